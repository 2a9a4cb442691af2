"""Proof of the gather: it moves bits, every bit, wherever a row of the table lies."""

from collections.abc import Mapping
from types import ModuleType

import torch

from skyrl_isoexec.kernels.embedding import reference
from skyrl_isoexec.kernels.embedding.cases import cases
from skyrl_isoexec.kernels.numeric.inputs import count_hazards, hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DEGREES, DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.schedule import Schedule
from skyrl_isoexec.schedule.bits import bit_view


def prove(proof: Proof, impl: ModuleType, schedule: Schedule, dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
    """Collect every check of `impl` in `proof`; the schedule does not enter a gather."""
    for label, dtype in dtypes.items():
        for name, (ids, w) in cases(dtype).items():
            found = impl.embedding(ids, w)
            if name == "no rows":
                proof.empty(f"{label} no rows", reference.embedding(ids, w), found)
                continue
            proof.equal(f"{label} reference", reference.embedding(ids, w), found, at=name)
            proof.equal(f"{label} reference", reference.embedding(ids, w), impl.embedding(ids.int(), w), at=name)
            proof.equal(f"{label} reference", bit_view(w)[ids], bit_view(found), at=f"{name}, a NaN's payload too")
            for hazard, count in count_hazards(found).items() if "hazards" in name else ():
                proof.reached(f"{label} {name}: {hazard}", count)
        w, ids = hazards(3, 88, 31, dtype=dtype, finite=False), torch.arange(88).flip(0)
        whole = impl.embedding(ids, w)
        proof.reached(f"{label} zeros that a sum of shards changes", ((whole == 0) & whole.signbit()).sum())
        for size in DEGREES:
            rows = len(w) // size
            owner = ids // rows
            parts = torch.stack([  # each rank's rows, of which one is taken and none is added
                impl.embedding(torch.where(owner == rank, ids - rank * rows, 0), part)
                for rank, part in enumerate(w.chunk(size))
            ])  # fmt: skip
            proof.equal(f"{label} vocabulary shards", whole, parts[owner, torch.arange(88)], at=f"degree {size}")
        proof.autograd(f"{label} autograd", lambda w, ids=ids: impl.embedding(ids, w), w)
        proof.repeats(f"{label} repeats", lambda ids=ids, w=w: impl.embedding(ids, w))
        w = normal(4, 50, 20, dtype=dtype)
        pool, anchor = torch.arange(max(ROW_COUNTS)) % 49, torch.tensor([49])
        proof.rows(f"{label} rows", lambda ids, w=w: impl.embedding(ids, w), (pool,), (anchor,))
