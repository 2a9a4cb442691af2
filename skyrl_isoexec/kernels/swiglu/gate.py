"""Proof of the products: an element depends on itself and its gate alone, also where a sigmoid is subnormal, 0 or 1."""

from collections.abc import Mapping
from types import ModuleType

import torch

from skyrl_isoexec.kernels.numeric.inputs import count_hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DEGREES, DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.kernels.swiglu import reference
from skyrl_isoexec.kernels.swiglu.cases import cases, sigmoid_cases
from skyrl_isoexec.schedule import Schedule

TINY = torch.finfo(torch.float32).tiny


def prove(proof: Proof, impl: ModuleType, schedule: Schedule, dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
    """Collect every check of `impl` in `proof`; the schedule does not enter a product."""
    for label, dtype in dtypes.items():
        _silu(proof, impl, label, dtype)
        _sigmoid_reference(proof, impl, f"{label} sigmoid", dtype)
        _sigmoid_places(proof, impl, f"{label} sigmoid", dtype)


def _silu(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
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
    proof.reached(f"{label} tails: subnormal results", ((tails != 0) & (tails.abs() < TINY)).sum())
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


def _sigmoid_reference(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    """The definition, at and between the ends of a gate."""
    for name, (x, gate) in sigmoid_cases(dtype).items():
        expected, found = reference.sigmoid_mul(x, gate), impl.sigmoid_mul(x, gate)
        if "no rows" in name:
            proof.empty(f"{label} {name}", expected, found)
        else:
            proof.equal(f"{label} reference", expected, found, at=name)
        for hazard, count in count_hazards(gate).items() if "hazards" in name else ():
            proof.reached(f"{label} {name}: {hazard}", count)
        if "finite hazards" in name:
            proof.reached(f"{label} {name}: -0 in the results", count_hazards(expected).get("-0", 0))
        if "tails" in name:
            sigmoid = reference.sigmoid(gate)
            proof.reached(f"{label} {name}: subnormal", ((sigmoid > 0) & (sigmoid < TINY)).sum())
            proof.reached(f"{label} {name}: 0", (sigmoid == 0).sum())
            proof.reached(f"{label} {name}: 1", (sigmoid == 1).sum())
    x = sigmoid_cases(dtype)["elements, finite hazards"][0]
    proof.reached(f"{label} ends: -0", count_hazards(x)["-0"])
    for kind, gate in (("elements", x), ("tokens", x[:, :1])):
        for end in (200.0, float("inf")):
            open_gate = torch.full_like(gate, end)
            proof.equal(f"{label} ends", x, impl.sigmoid_mul(x, open_gate), at=f"{kind}, open at {end}")
            proof.equal(f"{label} ends", x * 0.0, impl.sigmoid_mul(x, -open_gate), at=f"{kind}, closed at {-end}")


def _sigmoid_places(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    """Columns, elements and rows, in every place."""
    for kind, width in (("elements", 88), ("tokens", 1)):
        name = f"{label} of {kind}:"
        x, gate = normal(1, 7, 88, dtype=dtype), normal(2, 7, width, dtype=dtype, scale=5.0)
        whole = impl.sigmoid_mul(x, gate)
        for size in DEGREES:
            gates = gate.chunk(size, 1) if width > 1 else [gate] * size
            parts = zip(x.chunk(size, 1), gates, strict=True)
            shards = torch.cat([impl.sigmoid_mul(a, g) for a, g in parts], 1)
            proof.equal(f"{name} column shards", whole, shards, at=f"degree {size}")
        wide = gate.expand_as(x)
        proof.equal(f"{name} expanded", whole, impl.sigmoid_mul(x, wide))
        for i in range(88):  # in the vector body of a loop or in its remainder
            alone = impl.sigmoid_mul(x[:, i : i + 1], wide[:, i : i + 1])
            proof.equal(f"{name} elements", whole[:, i : i + 1], alone, at=f"column {i}")
            rest = gate[:1, i:] if width > 1 else gate[:1]
            proof.equal(f"{name} elements", whole[:1, i:], impl.sigmoid_mul(x[:1, i:], rest), at=f"from {i}")
        proof.autograd(f"{name} autograd", impl.sigmoid_mul, x, gate)
        proof.repeats(f"{name} repeats", lambda x=x, gate=gate: impl.sigmoid_mul(x, gate))
        pool = normal(3, max(ROW_COUNTS), 33, dtype=dtype), normal(4, max(ROW_COUNTS), min(width, 33), dtype=dtype)
        anchor = normal(5, 1, 33, dtype=dtype), normal(6, 1, min(width, 33), dtype=dtype)
        proof.rows(f"{name} rows", impl.sigmoid_mul, pool, anchor)
