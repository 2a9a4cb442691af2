"""Proof of silu(gate) * up: an element depends on itself alone, also where the sigmoid is subnormal, 0 or 1."""

from collections.abc import Mapping
from types import ModuleType

import torch

from skyrl_isoexec.kernels.numeric.inputs import count_hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DEGREES, DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.kernels.swiglu import reference
from skyrl_isoexec.kernels.swiglu.cases import cases
from skyrl_isoexec.schedule import Schedule


def prove(proof: Proof, impl: ModuleType, schedule: Schedule, dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
    """Collect every check of `impl` in `proof`; the schedule does not enter the product."""
    for label, dtype in dtypes.items():
        for name, (gate, up) in cases(dtype).items():
            expected, found = reference.silu_mul(gate, up), impl.silu_mul(gate, up)
            if name == "no rows":
                proof.empty(f"{label} no rows", expected, found)
            else:
                proof.equal(f"{label} reference", expected, found, at=name)
            for hazard, count in count_hazards(gate).items() if "hazards" in name else ():
                proof.reached(f"{label} {name}: {hazard}", count)
            if name == "finite hazards with others":
                proof.reached(f"{label} {name}: -0 in the results", count_hazards(expected).get("-0", 0))
        tails = reference.silu_mul(*cases(dtype)["tails"])
        tiny = torch.finfo(torch.float32).tiny
        proof.reached(f"{label} tails: subnormal results", ((tails != 0) & (tails.abs() < tiny)).sum())
        proof.reached(f"{label} tails: zeros", (tails == 0).sum())
        gate, up = (normal(i, 7, 88, dtype=dtype, scale=5.0) for i in (1, 2))
        whole = impl.silu_mul(gate, up)
        for size in DEGREES:
            parts = zip(gate.chunk(size, 1), up.chunk(size, 1), strict=True)
            shards = torch.cat([impl.silu_mul(g, u) for g, u in parts], 1)
            proof.equal(f"{label} column shards", whole, shards, at=f"degree {size}")
        for i in range(88):  # in the vector body of a loop or in its remainder
            alone = impl.silu_mul(gate[:, i : i + 1], up[:, i : i + 1])
            proof.equal(f"{label} elements", whole[:, i : i + 1], alone, at=f"column {i}")
            proof.equal(f"{label} elements", whole[0, i:], impl.silu_mul(gate[0, i:], up[0, i:]), at=f"from {i}")
        proof.autograd(f"{label} autograd", impl.silu_mul, gate, up)
        proof.repeats(f"{label} repeats", lambda gate=gate, up=up: impl.silu_mul(gate, up))
        pool = tuple(normal(i, max(ROW_COUNTS), 33, dtype=dtype) for i in (3, 4))
        anchor = tuple(normal(i, 1, 33, dtype=dtype) for i in (5, 6))
        proof.rows(f"{label} rows", impl.silu_mul, pool, anchor)
