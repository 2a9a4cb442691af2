"""Shared arithmetic for Triton kernels: the pieces whose order or rounding decides bits, and checks of operands.

Notable: a sum inside a tile is `tree`, a balanced tree over neighbours made of two-element sums, so that it depends on
neither the layout of registers nor the number of warps. Every kernel is launched with `EXACT`, so that `exp` is
`numeric.reference.exp`, bit for bit. Triton's interpreter truncates where the chip rounds to bf16 and has no bf16
product: `narrow` and `dot` stand in for both there, with float64 sums.

Importing this module chooses the assembler of every Triton kernel of the process, see `choose_assembler`.
"""

from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia import compiler
from triton.knobs import NvidiaTool

from skyrl_isoexec.kernels.numeric import reference

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter, on the CPU; decided when Triton is imported."""
SUM_TYPE = tl.constexpr(tl.float64 if triton.knobs.runtime.interpret else tl.float32)
"""Type of the accumulator of a product: float64 stands for the tensor core's order in the interpreter."""
EXACT = {"enable_fp_fusion": False}
"""Launch options of every kernel: products and sums each round on their own, and what is fused is written as `fma`."""

ASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
"""Of Triton's two assemblers, which its wheel holds, the one that it takes for newer chips."""
ASSEMBLER_VERSION = "12.9"

LOG2_E = tl.constexpr(reference.LOG2_E)
TO_INTEGER = tl.constexpr(reference.TO_INTEGER)
TO_INTEGER_BITS = tl.constexpr(reference.TO_INTEGER_BITS)
LN2_HIGH, LN2_LOW = tl.constexpr(reference.LN2_HIGH), tl.constexpr(reference.LN2_LOW)
P7, P6, P5, P4, P3, P2 = (tl.constexpr(c) for c in reference.POLYNOMIAL)
OVERFLOWS, VANISHES = tl.constexpr(reference.EXP_OVERFLOWS), tl.constexpr(reference.EXP_VANISHES)


def choose_assembler() -> None:
    """Let every Triton kernel of this process be assembled by `ASSEMBLER`; RuntimeError if it is not there.

    The one that Triton takes for this chip, 12.8, can add a carry to the wrong word of a shared-memory descriptor: a
    product of the tensor core then reads other memory. `tests/kernels/test_sm90_assembled.py` looks for that.
    """
    tool = NvidiaTool.from_path(str(ASSEMBLER))
    if tool is None or tool.version != ASSEMBLER_VERSION:
        found = "missing" if tool is None else f"of version {tool.version}"
        raise RuntimeError(f"{ASSEMBLER} is {found}, not of version {ASSEMBLER_VERSION}; install the pinned triton")
    triton.knobs.nvidia.ptxas = str(ASSEMBLER)
    compiler.get_ptxas_version.cache_clear()  # its version is part of the name of what is compiled
    compiler.CUDABackend.hash.cache_clear()


if not INTERPRETED.value:
    choose_assembler()


@triton.jit
def exp(x):
    """fp32 exponential of `numeric.reference.exp`: the same products and sums."""
    shifted = x * LOG2_E + TO_INTEGER
    n = shifted - TO_INTEGER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = r * P7 + P6
    p = p * r + P5
    p = p * r + P4
    p = p * r + P3
    p = p * r + P2
    y = (p * (r * r) + r) + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) - TO_INTEGER_BITS
    half = exponent >> 1
    y = y * ((half + 127) << 23).to(tl.float32, bitcast=True)
    y = y * (((exponent - half) + 127) << 23).to(tl.float32, bitcast=True)
    y = tl.where(x > OVERFLOWS, float("inf"), y)
    return tl.where(x < VANISHES, 0.0, y)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 to fp32 or bf16, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def widen(x):
    """bf16 or fp32 to fp32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def dot(a, b, acc):
    """acc + a b of bf16 operands, in ascending steps of the tensor core; acc is `SUM_TYPE` or fp32."""
    if INTERPRETED:
        wide = tl.dot(widen(a).to(tl.float64), widen(b).to(tl.float64), acc.to(tl.float64), out_dtype=tl.float64)
        return wide.to(acc.dtype)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def tree(x, NUM: tl.constexpr, WIDTH: tl.constexpr):
    """[NUM] sums over the last dimension of [NUM, WIDTH], WIDTH a power of two: neighbours, lower index on the left.

    Each step is a sum over a dimension of length two, which has one order in every layout.
    """
    for step in tl.static_range(1, 20):
        if (WIDTH >> step) >= 1:
            x = tl.sum(tl.reshape(x, (NUM, WIDTH >> step, 2)), axis=2)
    return tl.reshape(x, (NUM,))


def require(op: str, *tensors: Tensor | None) -> None:
    """Refuse (TypeError) tensors that are not on a CUDA device, unless kernels are interpreted."""
    for x in tensors:
        if x is not None and not x.is_cuda and not INTERPRETED.value:
            raise TypeError(f"{op}: the sm90 implementation was given a tensor on {x.device}")


def require_bf16(op: str, *tensors: Tensor | None) -> None:
    """As `require`, and refuse (TypeError) weights and activations that are not bf16."""
    require(op, *tensors)
    for x in tensors:
        if x is not None and x.dtype != torch.bfloat16:
            raise TypeError(
                f"{op}: the sm90 implementation takes bfloat16, not {x.dtype}: Hopper has no exact fp32 dot"
            )


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a graph has to be recorded for any of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
