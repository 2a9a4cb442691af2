"""Proof of the norms: a row depends on itself, its gate and the weight alone, in the order of the reference."""

from collections.abc import Mapping
from types import ModuleType

import torch

from skyrl_isoexec.kernels.numeric.inputs import count_hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.kernels.rmsnorm import reference
from skyrl_isoexec.kernels.rmsnorm.cases import EPS, cases, gated_cases
from skyrl_isoexec.kernels.rmsnorm.spec import OFFSETS
from skyrl_isoexec.schedule import Schedule

WIDTH = 250
TINY = torch.finfo(torch.float32).tiny


def prove(
    proof: Proof,
    impl: ModuleType,
    schedule: Schedule,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    definition: ModuleType = reference,
) -> None:
    """Collect every check of `impl` in `proof`; the schedule does not enter a norm."""
    for label, dtype in dtypes.items():
        for offset in OFFSETS:
            name = f"{label} zero-centred" if offset else label
            _reference(proof, impl, definition, name, dtype, offset)
            _rows(proof, impl, definition, name, dtype, offset)
        _gated(proof, impl, definition, f"{label} gated", dtype)


def _reference(
    proof: Proof, impl: ModuleType, definition: ModuleType, label: str, dtype: torch.dtype, offset: float
) -> None:
    for name, (x, residual, w) in cases(dtype).items():
        expected, found = (
            (module.rmsnorm(x, w, EPS, offset), *module.add_rmsnorm(x, residual, w, EPS, offset))
            for module in (definition, impl)
        )
        if name == "no rows":
            proof.empty(f"{label} no rows", expected, found)
        else:
            proof.equal(f"{label} reference", expected, found, at=name)
        for hazard, count in count_hazards(x).items() if "hazards" in name else ():
            proof.reached(f"{label} {name}: {hazard}", count)
        if "hazards" in name:
            proof.reached(f"{label} {name}: -0 in the weight", count_hazards(w)["-0"])
            proof.reached(f"{label} {name}: -1 in the weight", (w == -1).sum())
        if name == "finite hazards":
            proof.reached(f"{label} {name}: -0 in the results", count_hazards(expected[0]).get("-0", 0))


def _rows(
    proof: Proof, impl: ModuleType, definition: ModuleType, label: str, dtype: torch.dtype, offset: float
) -> None:
    """Sums, strides, repeats, batches, subnormal rows."""

    def norm(x, w):
        return impl.rmsnorm(x, w, EPS, offset)

    def add(x, residual, w):
        return impl.add_rmsnorm(x, residual, w, EPS, offset)

    rows, other = normal(1, 6, WIDTH, dtype=dtype), normal(2, 6, WIDTH, dtype=dtype)
    w = normal(3, WIDTH, dtype=dtype)
    whole, (added, total) = norm(rows, w), add(rows, other, w)
    proof.equal(f"{label} sum rounded before the norm", (other.float() + rows.float()).to(dtype), total, at="sum")
    proof.equal(f"{label} sum rounded before the norm", norm(total, w), added, at="norm")
    proof.equal(f"{label} strides", whole, norm(rows.t().contiguous().t(), w), at="transposed")
    proof.equal(f"{label} strides", whole, norm(rows.view(2, 3, -1), w).flatten(0, 1), at="stacked")
    proof.autograd(f"{label} autograd", norm, rows, w)
    proof.autograd(f"{label} autograd, sum", add, rows, other, w)
    proof.repeats(f"{label} repeats", lambda: add(rows, other, w))
    pool = tuple(normal(i, max(ROW_COUNTS), WIDTH, dtype=dtype) for i in (4, 5))
    anchor = tuple(normal(i, 1, WIDTH, dtype=dtype) for i in (6, 7))
    proof.rows(f"{label} rows", lambda x: norm(x, w), pool[:1], anchor[:1])
    proof.rows(f"{label} rows, sum", lambda x, r: add(x, r, w), pool, anchor)
    subnormal, ones = torch.full((2, 40), 1e-40, dtype=dtype), torch.ones(40, dtype=dtype)
    is_subnormal = (subnormal != 0) & (subnormal.abs() < TINY)
    proof.reached(f"{label} subnormal rows", is_subnormal.sum())
    proof.equal(f"{label} subnormal rows", definition.rmsnorm(subnormal, ones, EPS, offset), norm(subnormal, ones))


def _gated(proof: Proof, impl: ModuleType, definition: ModuleType, label: str, dtype: torch.dtype) -> None:
    def gated(x, z, w):
        return impl.gated_rmsnorm(x, z, w, EPS)

    for name, (x, z, w) in gated_cases(dtype).items():
        expected, found = definition.gated_rmsnorm(x, z, w, EPS), gated(x, z, w)
        if name == "no rows":
            proof.empty(f"{label} no rows", expected, found)
        else:
            proof.equal(f"{label} reference", expected, found, at=name)
        for hazard, count in count_hazards(z).items() if "hazards" in name else ():
            proof.reached(f"{label} {name}: {hazard} in the gate", count)
        if name == "tails":
            proof.reached(f"{label} tails: subnormal results", ((expected != 0) & (expected.abs() < TINY)).sum())
            for zero in ("+0", "-0"):
                proof.reached(f"{label} tails: {zero}", count_hazards(expected).get(zero, 0))
    x, z, w = normal(1, 6, WIDTH, dtype=dtype), normal(2, 6, WIDTH, dtype=dtype), normal(3, WIDTH, dtype=dtype)
    whole, far = gated(x, z, w), torch.full_like(z, 256.0)
    scaled = (impl.rmsnorm(x, w, EPS).float() * 256.0).to(dtype)
    proof.equal(f"{label} open", scaled, gated(x, far, w))
    proof.equal(f"{label} closed", scaled * -0.0, gated(x, -far, w))
    proof.equal(f"{label} strides", whole, gated(x.t().contiguous().t(), z, w), at="x transposed")
    proof.equal(f"{label} strides", whole, gated(x, z.t().contiguous().t(), w), at="gate transposed")
    proof.equal(f"{label} strides", whole, gated(x.view(2, 3, -1), z.view(2, 3, -1), w).flatten(0, 1), at="stacked")
    proof.autograd(f"{label} autograd", gated, x, z, w)
    proof.repeats(f"{label} repeats", lambda: gated(x, z, w))
    pool = tuple(normal(i, max(ROW_COUNTS), WIDTH, dtype=dtype) for i in (4, 5))
    anchor = tuple(normal(i, 1, WIDTH, dtype=dtype) for i in (6, 7))
    proof.rows(f"{label} rows", lambda x, z: gated(x, z, w), pool, anchor)
