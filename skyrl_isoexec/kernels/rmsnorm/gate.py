"""Proof of the norm: a row depends on itself and the weight alone, in the order that the reference states."""

from collections.abc import Mapping
from types import ModuleType

import torch

from skyrl_isoexec.kernels.numeric.inputs import count_hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.kernels.rmsnorm import reference
from skyrl_isoexec.kernels.rmsnorm.cases import EPS, cases
from skyrl_isoexec.schedule import Schedule

WIDTH = 250


def prove(
    proof: Proof,
    impl: ModuleType,
    schedule: Schedule,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    definition: ModuleType = reference,
) -> None:
    """Collect every check of `impl` in `proof`; the schedule does not enter a norm."""
    for label, dtype in dtypes.items():
        for name, (x, residual, w) in cases(dtype).items():
            expected = (definition.rmsnorm(x, w, EPS), *definition.add_rmsnorm(x, residual, w, EPS))
            found = (impl.rmsnorm(x, w, EPS), *impl.add_rmsnorm(x, residual, w, EPS))
            if name == "no rows":
                proof.empty(f"{label} no rows", expected, found)
            else:
                proof.equal(f"{label} reference", expected, found, at=name)
            for hazard, count in count_hazards(x).items() if "hazards" in name else ():
                proof.reached(f"{label} {name}: {hazard}", count)
            if name == "finite hazards":
                proof.reached(f"{label} {name}: -0 in the results", count_hazards(expected[0]).get("-0", 0))
        rows, other = normal(1, 6, WIDTH, dtype=dtype), normal(2, 6, WIDTH, dtype=dtype)
        w = normal(3, WIDTH, dtype=dtype)
        whole, (added, total) = impl.rmsnorm(rows, w, EPS), impl.add_rmsnorm(rows, other, w, EPS)
        proof.equal(f"{label} sum rounded before the norm", (other.float() + rows.float()).to(dtype), total, at="sum")
        proof.equal(f"{label} sum rounded before the norm", impl.rmsnorm(total, w, EPS), added, at="norm")
        proof.equal(f"{label} strides", whole, impl.rmsnorm(rows.t().contiguous().t(), w, EPS), at="transposed")
        proof.equal(f"{label} strides", whole, impl.rmsnorm(rows.view(2, 3, -1), w, EPS).flatten(0, 1), at="stacked")
        proof.autograd(f"{label} autograd", lambda x, w: impl.rmsnorm(x, w, EPS), rows, w)
        proof.autograd(f"{label} autograd, sum", lambda x, r, w: impl.add_rmsnorm(x, r, w, EPS), rows, other, w)
        proof.repeats(f"{label} repeats", lambda x=rows, r=other, w=w: impl.add_rmsnorm(x, r, w, EPS))
        pool = tuple(normal(i, max(ROW_COUNTS), WIDTH, dtype=dtype) for i in (4, 5))
        anchor = tuple(normal(i, 1, WIDTH, dtype=dtype) for i in (6, 7))
        proof.rows(f"{label} rows", lambda x, w=w: impl.rmsnorm(x, w, EPS), pool[:1], anchor[:1])
        proof.rows(f"{label} rows, sum", lambda x, r, w=w: impl.add_rmsnorm(x, r, w, EPS), pool, anchor)
        subnormal, ones = torch.full((2, 40), 1e-40, dtype=dtype), torch.ones(40, dtype=dtype)
        is_subnormal = (subnormal != 0) & (subnormal.abs() < torch.finfo(torch.float32).tiny)
        proof.reached(f"{label} subnormal rows", is_subnormal.sum())
        expected = definition.rmsnorm(subnormal, ones, EPS)
        proof.equal(f"{label} subnormal rows", expected, impl.rmsnorm(subnormal, ones, EPS))
