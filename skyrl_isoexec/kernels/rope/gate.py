"""Proof of the rotation, whole or partial: a token's bits depend on its own numbers and its position alone."""

from collections.abc import Mapping
from types import ModuleType

import torch

from skyrl_isoexec.kernels.numeric.inputs import count_hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DEGREES, DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.kernels.rope import reference
from skyrl_isoexec.kernels.rope.cases import NUM_POSITIONS, cases, payloads, table
from skyrl_isoexec.schedule import Schedule
from skyrl_isoexec.schedule.bits import bit_view

HEADS, HEAD_DIM, PART = 8, 64, 16


def prove(proof: Proof, impl: ModuleType, schedule: Schedule, dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
    """Collect every check of `impl` in `proof`; the schedule does not enter a rotation."""
    for label, dtype in dtypes.items():
        _reference(proof, impl, label, dtype)
        _tokens(proof, impl, label, dtype, HEAD_DIM)
        _tokens(proof, impl, f"{label} partial", dtype, PART)
        _rest(proof, impl, label, dtype)


def _reference(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    for name, (x, positions, cos_sin) in cases(dtype).items():
        expected, found = reference.rope(x, positions, cos_sin), impl.rope(x, positions, cos_sin)
        if "no rows" in name:
            proof.empty(f"{label} {name}", expected, found)
        else:
            proof.equal(f"{label} reference", expected, found, at=name)
        for hazard, count in count_hazards(x).items() if "hazards" in name else ():
            proof.reached(f"{label} {name}: {hazard}", count)
        if "zeros" in name:
            proof.reached(f"{label} {name}: -0 in the results", count_hazards(expected).get("-0", 0))


def _tokens(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype, rotated: int) -> None:
    """Order of tokens, cuts, heads and batches."""
    cos_sin, count = table(rotated), 33
    x, positions = normal(1, count, HEADS, HEAD_DIM, dtype=dtype), torch.arange(count)
    whole = impl.rope(x, positions, cos_sin)
    proof.equal(f"{label} order of tokens", whole.flip(0), impl.rope(x.flip(0), positions.flip(0), cos_sin))
    for cut in (1, 15, 16, 17, 32):
        parts = [impl.rope(x[s], positions[s], cos_sin) for s in (slice(0, cut), slice(cut, count))]
        proof.equal(f"{label} cut prefill", whole, torch.cat(parts), at=f"at {cut}")
    decoded = [impl.rope(x[t : t + 1], positions[t : t + 1], cos_sin) for t in range(count)]
    proof.equal(f"{label} decode", whole, torch.cat(decoded))
    for size in DEGREES:
        heads = [impl.rope(part, positions, cos_sin) for part in x.chunk(size, 1)]
        proof.equal(f"{label} head shards", whole, torch.cat(heads, 1), at=f"degree {size}")
    proof.autograd(f"{label} autograd", lambda x, p=positions, c=cos_sin: impl.rope(x, p, c), x)
    proof.repeats(f"{label} repeats", lambda x=x, p=positions, c=cos_sin: impl.rope(x, p, c))
    pool = normal(2, max(ROW_COUNTS), 2, HEAD_DIM, dtype=dtype), torch.arange(max(ROW_COUNTS)) % NUM_POSITIONS
    anchor = normal(3, 1, 2, HEAD_DIM, dtype=dtype), torch.tensor([NUM_POSITIONS - 1])
    proof.rows(f"{label} rows", lambda x, p, c=cos_sin: impl.rope(x, p, c), pool, anchor)


def _rest(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    """What is not rotated is copied, not computed: zeros keep their sign, NaN its payload."""
    name, rotated = f"{label} rest of a head", 8
    for kind in ("zeros", "hazards"):
        x, positions, cos_sin = cases(dtype)[f"{kind}, {rotated} of 22"]
        y = impl.rope(x, positions, cos_sin)
        proof.reached(f"{name}: {kind}: -0", count_hazards(x[..., rotated:]).get("-0", 0))
        proof.equal(name, bit_view(x[..., rotated:]), bit_view(y[..., rotated:]), at=kind)
    x = payloads(dtype)
    proof.reached(f"{name}: different NaN", bit_view(x[..., rotated:]).unique().numel() - 1)
    y = impl.rope(x, torch.arange(len(x)), table(rotated))
    proof.equal(name, bit_view(x[..., rotated:]), bit_view(y[..., rotated:]), at="payloads")
