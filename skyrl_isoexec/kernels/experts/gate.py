"""Proof of a grouped linear: a row is a function of itself and its expert's weight, in the order of every linear.

Where the tensor core hides the order (`definition` None), every admitted tile must give the same accumulator, which
keeps a bound and is rounded as the reference rounds its own.
"""

from collections.abc import Mapping
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from skyrl_isoexec.kernels.experts import reference
from skyrl_isoexec.kernels.experts.cases import SPREADS, cases, starts_of
from skyrl_isoexec.kernels.numeric import narrow
from skyrl_isoexec.kernels.numeric.bound import product_bound
from skyrl_isoexec.kernels.numeric.inputs import count_hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DEGREES, DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.schedule import Schedule

WIDTH = 256
"""Inputs and outputs of the experts among which a row is moved about."""
TILED = ((192, 1024), (256, 520))
"""(N, K) on which every tile of a table is proved; the second is not whole blocks of K."""


def prove(
    proof: Proof,
    impl: ModuleType,
    schedule: Schedule,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    definition: ModuleType | None = reference,
) -> None:
    """Collect every check of `impl` in `proof`; the schedule does not enter a linear."""
    for label, dtype in dtypes.items():
        (_tensor_core if definition is None else _reference)(proof, impl, label, dtype)
        x, w = normal(1, 24, 70, dtype=dtype), normal(2, 8, 40, 70, dtype=dtype)
        starts = starts_of([3, 0, 1, 9, 0, 0, 4, 7])
        whole = impl.grouped_linear(x, w, starts)
        for size in DEGREES:
            proof.equal(f"{label} experts of ranks", whole, _ranks(impl, x, w, starts, size), at=f"degree {size}")
        proof.reached(f"{label} ranks without a row", sum(not rows for rows in (starts[1:] - starts[:-1]).tolist()))
        wide, across = torch.cat([x, x], 1)[:, :70], x.t().contiguous().t()
        every_other = w.repeat_interleave(2, 0)[::2]
        proof.equal(f"{label} strides", whole, impl.grouped_linear(wide, w, starts), at="sliced x")
        proof.equal(f"{label} strides", whole, impl.grouped_linear(across, w, starts), at="transposed x")
        proof.equal(f"{label} strides", whole, impl.grouped_linear(x, every_other, starts), at="sliced w")
        turned = w.transpose(1, 2).contiguous().transpose(1, 2)
        proof.equal(f"{label} strides", whole, impl.grouped_linear(x, turned, starts), at="transposed w")
        proof.autograd(f"{label} autograd", lambda x, w, s=starts: impl.grouped_linear(x, w, s), x, w)
        proof.repeats(f"{label} repeats", lambda x=x, w=w, s=starts: impl.grouped_linear(x, w, s))
        _rows(proof, impl, label, dtype, definition)


def _ranks(impl: ModuleType, x: Tensor, w: Tensor, starts: Tensor, size: int) -> Tensor:
    """The rows of each rank's experts, in ascending order of ranks, as they are gathered."""
    gathered, owned = [], w.shape[0] // size
    for first in range(0, w.shape[0], owned):
        part = impl.grouped_linear(x, w[first : first + owned], starts[first : first + owned + 1])
        gathered.append(part[int(starts[first]) : int(starts[first + owned])])
    return torch.cat(gathered)


def _reference(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    for name, (x, w, starts) in cases(dtype).items():
        for out_dtype in (None, torch.float32, torch.bfloat16):
            expected = reference.grouped_linear(x, w, starts, out_dtype)
            found = impl.grouped_linear(x, w, starts, out_dtype)
            if name == "no rows":
                proof.empty(f"{label} no rows", expected, found)
            else:
                proof.equal(f"{label} reference", expected, found, at=f"{name}, out {out_dtype}")
        _reach(proof, label, name, x, starts)


def _reach(proof: Proof, label: str, name: str, x: Tensor, starts: Tensor) -> None:
    for hazard, count in count_hazards(x).items() if "hazards" in name else ():
        proof.reached(f"{label} {name}: {hazard}", count)
    if name in SPREADS and name != "even":
        proof.reached(f"{label} {name}: experts without a row", int((starts[1:] == starts[:-1]).sum()))
    if "nobody" in name:
        proof.reached(f"{label} {name}", x.shape[0] - int(starts[-1] - starts[0]))


def _tensor_core(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    """Bound, rounding, each row by itself with its expert alone, and every tile of the table."""
    for name, (x, w, starts) in cases(dtype).items():
        sums = impl.grouped_linear(x, w, starts, torch.float32)
        if name == "no rows":
            proof.empty(f"{label} no rows", torch.zeros(0, w.shape[1]), sums)
            continue
        proof.equal(f"{label} rounding", narrow(sums, dtype), impl.grouped_linear(x, w, starts), at=name)
        _reach(proof, label, name, x, starts)
        alone = torch.zeros_like(sums)
        for e, (first, last) in enumerate(pairwise(starts.tolist())):
            one = starts_of([1])
            for row in range(first, last):
                alone[row] = impl.grouped_linear(x[row : row + 1], w[e : e + 1], one, torch.float32)[0]
            if first < last and "hazards" not in name:
                exact, bound = product_bound(x[first:last], w[e])
                proof.within(f"{label} within the bound", sums[first:last], exact, bound, at=f"{name}, expert {e}")
        proof.equal(f"{label} each row alone", sums, alone, at=name)
        _tiles(proof, impl, label, (x, w, starts), sums, name)
    for n, k in TILED:
        x, w = normal(1, 300, k, dtype=dtype), normal(2, 4, n, k, dtype=dtype)
        starts = starts_of([17, 0, 280, 2], first=1)
        sums = impl.grouped_linear(x, w, starts, torch.float32)
        _tiles(proof, impl, label, (x, w, starts), sums, f"{n} x {k}")


def _tiles(proof: Proof, impl: ModuleType, label: str, operands: tuple, sums: Tensor, at: str) -> None:
    _, num_n, num_k = operands[1].shape
    for tile in impl.TABLE.tiles(num_n, num_k, 1, num_k % 8 == 0):
        proof.equal(f"{label} tiles", sums, impl.forward(*operands, torch.float32, tile), at=f"{at}, {tile}")


def _rows(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype, definition: ModuleType | None) -> None:
    """An anchor row of one expert, among rows of many experts and among rows of its own alone."""
    w = normal(1, 4, WIDTH, WIDTH, dtype=dtype)
    pool, anchor = normal(2, max(ROW_COUNTS), WIDTH, dtype=dtype), normal(3, 1, WIDTH, dtype=dtype)
    own = torch.full((1,), 2)
    if definition is not None:
        expected = definition.grouped_linear(anchor, w, starts_of([0, 0, 1, 0]))
        proof.equal(f"{label} rows", expected, _by_expert(impl, anchor, w, own), at="alone")
    for name, ids in (("many experts", torch.arange(max(ROW_COUNTS)) * 7 % 4), ("one expert", own.repeat(1024))):
        proof.rows(f"{label} rows, {name}", lambda x, ids: _by_expert(impl, x, w, ids), (pool, ids), (anchor, own))


def _by_expert(impl: ModuleType, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    """Rows sorted by expert, multiplied, and put back."""
    order = ids.argsort(stable=True)
    starts = starts_of(ids.bincount(minlength=w.shape[0]).tolist())
    out = torch.empty(x.shape[0], w.shape[1], dtype=x.dtype)
    out[order] = impl.grouped_linear(x[order], w, starts)
    return out
