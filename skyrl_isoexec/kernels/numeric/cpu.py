"""Shared arithmetic for compiled loops (numba): the same bits as `numeric.reference`.

Compiled code gets addresses and sizes, all 64-bit integers, never arrays: a call costs well under a microsecond, every
entry point has one signature, and a bfloat16 tensor needs no view. The caller keeps the tensors alive and contiguous.

- `@compiled` makes an entry point: one thread, without the interpreter lock, machine code cached on disk.
- `@inlined` makes a piece of one.
- `f32(address)[i]`, `u16`, `i32`, `i64` read and write memory; bfloat16 is `widen(u16(address)[i])`, `narrow(value)`.

What must stay equal: no fused multiply-add, no reassociation. `fastmath` stays off, so the compiler may do neither.
Constants are numpy float32 scalars, because a Python float or int would silently widen an expression to float64.
"""

import hashlib
import inspect
import threading
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.extending import intrinsic

from skyrl_isoexec.kernels.numeric import reference

NUM_LANES = reference.NUM_LANES
ZERO, ONE = np.float32(0), np.float32(1)
INFINITY = np.float32(np.inf)

NEVER_COMPILED = ("cases.py", "gate.py", "inputs.py", "kernel.py", "proof.py", "requests.py")
"""Ends of names of files beside the loops that no loop calls; nor does one call a file of another arch."""
ELSEWHERE = ("sm90", "triton")
"""Parts of the names of such files."""

_THREAD = threading.local()
_OPTIONS = {"fastmath": False, "error_model": "numpy", "nogil": True, "boundscheck": False}
_LOG2_E = np.float32(reference.LOG2_E)
_TO_INTEGER = np.float32(reference.TO_INTEGER)
_TO_INTEGER_BITS = np.int32(reference.TO_INTEGER_BITS)
_LN2_HIGH, _LN2_LOW = np.float32(reference.LN2_HIGH), np.float32(reference.LN2_LOW)
_P7, _P6, _P5, _P4, _P3, _P2 = (np.float32(c) for c in reference.POLYNOMIAL)
_OVERFLOWS, _VANISHES = np.float32(reference.EXP_OVERFLOWS), np.float32(reference.EXP_VANISHES)


def _source_digest(function: Callable) -> str:
    """Digest of everything that may decide the machine code: the function's folder, this folder, and numba."""
    digest = hashlib.sha256(numba.__version__.encode())
    for folder in (Path(inspect.getfile(function)).parent, Path(__file__).parent):
        for path in sorted(folder.glob("*.py")):
            if not path.name.endswith(NEVER_COMPILED) and not any(part in path.name for part in ELSEWHERE):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class _CacheFiles(CompileResultCacheImpl):
    """Cache files named by the digest of the sources, not only by path and time.

    numba's own key does not see a change in a file that the function calls into, and its index may for a moment lead
    another process to the data of an older source. With one signature per function and the digest in the name, every
    process that writes a file writes the same code into it, and replaces it atomically.
    """

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        return f"{super().get_filename_base(fullname, abiflags)}.{self._digest}"

    def __init__(self, function: Callable) -> None:
        self._digest = _source_digest(function)
        super().__init__(function)


class _Cache(FunctionCache):
    _impl_class = _CacheFiles


def compiled(function: Callable) -> Callable:
    """Entry point: compiled on its first call, then loaded from the cache on disk. Arguments are ints and floats."""
    dispatcher = numba.njit(**_OPTIONS)(function)
    dispatcher._cache = _Cache(function)
    return dispatcher


def inlined(function: Callable) -> Callable:
    """Part of an entry point of any file: inlined there by the compiler, never called from Python."""
    return numba.njit(forceinline=True, **_OPTIONS)(function)


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a graph must be recorded; False at once under `no_grad`, as in an engine."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def require_cpu(*tensors: torch.Tensor | None) -> None:
    """Refuse (ValueError) tensors whose address is not one of the CPU's memory: a loop would read anything there."""
    for t in tensors:
        if t is not None and not t.is_cpu:
            raise ValueError(f"the cpu kernels cannot read a tensor of device {t.device}")


def scratch(size: int) -> int:
    """Address of `size` fp32 numbers of this thread, of any content, valid until its next call of `scratch`."""
    held = getattr(_THREAD, "scratch", None)
    if held is None or held.numel() < size:
        held = _THREAD.scratch = torch.empty(size, dtype=torch.float32)
    return held.data_ptr()


def _pointer(element: types.Type) -> Callable:
    @intrinsic
    def pointer(typing_context, address):
        def codegen(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return pointer


f32 = _pointer(types.float32)
u16 = _pointer(types.uint16)
i32 = _pointer(types.int32)
i64 = _pointer(types.int64)


@inlined
def exp(x):
    """fp32 exponential; see `reference.exp`."""
    shifted = x * _LOG2_E + _TO_INTEGER
    n = shifted - _TO_INTEGER
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = _P7 * r + _P6
    p = p * r + _P5
    p = p * r + _P4
    p = p * r + _P3
    p = p * r + _P2
    y = (p * (r * r) + r) + ONE
    exponent = np.int32(np.float32(shifted).view(np.int32) - _TO_INTEGER_BITS)
    half = np.int32(exponent >> np.int32(1))
    rest = np.int32(exponent - half)
    y = y * np.int32((half + np.int32(127)) << np.int32(23)).view(np.float32)
    y = y * np.int32((rest + np.int32(127)) << np.int32(23)).view(np.float32)
    y = INFINITY if x > _OVERFLOWS else y
    return ZERO if x < _VANISHES else y


@inlined
def widen(bits):
    """bf16 bits (uint16) to the fp32 value, exactly."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inlined
def narrow(x):
    """fp32 value to bf16 bits (uint16), to nearest, ties to even; every NaN becomes 0x7fc0."""
    bits = np.float32(x).view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16(0x7FC0) if x != x else np.uint16(rounded >> np.uint32(16))


@inlined
def read(address, bf16, index):
    """Element `index` of an fp32 (bf16 = 0) or bf16 (bf16 = 1) tensor, as fp32."""
    return widen(u16(address)[index]) if bf16 else f32(address)[index]


@inlined
def write(address, bf16, index, value):
    """Store fp32 `value`, rounded once where the tensor is bf16."""
    if bf16:
        u16(address)[index] = narrow(value)
    else:
        f32(address)[index] = value


@inlined
def rounded(value, bf16):
    """fp32 `value` as it is after a store to, and a load from, a tensor of that dtype."""
    return widen(narrow(value)) if bf16 else value


@inlined
def lane_tree(lanes):
    """Balanced tree over the 16 fp32 elements of `lanes` (array or pointer): neighbours first, lower index left."""
    a = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
    b = ((lanes[8] + lanes[9]) + (lanes[10] + lanes[11])) + ((lanes[12] + lanes[13]) + (lanes[14] + lanes[15]))
    return a + b
