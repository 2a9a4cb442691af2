"""Proof of a row-parallel linear: its sum over K is one tree, whoever owns which leaves, whatever rows are beside."""

from types import ModuleType

import torch

from skyrl_isoexec.kernels.numeric.inputs import count_hazards, hazards, normal
from skyrl_isoexec.kernels.numeric.panels import pack
from skyrl_isoexec.kernels.numeric.proof import DEGREES, DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.kernels.row_linear import reference
from skyrl_isoexec.kernels.row_linear.cases import NUM_LEAVES, cases
from skyrl_isoexec.schedule import ReductionTree, Schedule

WIDTH = 2048
"""Inputs of the linear in which a row is moved about."""


def prove(proof: Proof, impl: ModuleType, schedule: Schedule) -> None:
    """Collect every check of `impl` in `proof`, for a tree of the schedule's leaves."""
    for label, dtype in DTYPES.items():
        _reference(proof, impl, label, dtype)
        _degrees(proof, impl, label, dtype, schedule.num_leaves)
        x, w = normal(1, 5, 512, dtype=dtype), normal(2, 70, 512, dtype=dtype)
        whole, packed = impl.row_linear(x, w, NUM_LEAVES), pack(w)
        proof.autograd(f"{label} autograd", lambda x, w: impl.row_linear(x, w, NUM_LEAVES), x, w)
        wide = torch.cat([x, x], 1)[:, :512]
        proof.equal(f"{label} strides", whole, impl.row_linear(wide, w.t().contiguous().t(), NUM_LEAVES))
        proof.repeats(f"{label} repeats", lambda x=x, w=w, p=packed: impl.row_linear(x, w, NUM_LEAVES, p))
        _rows(proof, impl, label, dtype)
    parts = hazards(7, 8, 9, 20, finite=False)
    proof.reached("tree: NaN parts", parts.isnan().sum())
    for count in DEGREES:
        proof.equal("tree", reference.tree_sum(parts[:count]), impl.tree_sum(parts[:count]), at=f"{count} parts")
    proof.autograd("tree, autograd", impl.tree_sum, normal(1, 4, 3, 5))


def _reference(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    for name, (x, w) in cases(dtype).items():
        for leaves in (1, 2, 4, NUM_LEAVES):
            expected = reference.row_linear(x, w, leaves)
            plain, packed = impl.row_linear(x, w, leaves), impl.row_linear(x, w, leaves, pack(w))
            if name == "no rows":
                proof.empty(f"{label} no rows", (expected, expected), (plain, packed))
                continue
            proof.equal(f"{label} reference", expected, plain, at=f"{name}, {leaves} leaves")
            proof.equal(f"{label} reference", expected, packed, at=f"{name}, {leaves} leaves, packed")
        for hazard, count in count_hazards(x).items() if "hazards" in name else ():
            proof.reached(f"{label} {name}: {hazard}", count)


def _degrees(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype, num_leaves: int) -> None:
    """Ranks own subtrees of the leaves; their roots finish the tree."""
    x, w = normal(1, 33, 512, dtype=dtype), normal(2, 70, 512, dtype=dtype)
    whole, tree = reference.row_linear(x, w, num_leaves), ReductionTree(num_leaves=num_leaves)
    bounds = tree.leaf_bounds(512)
    for size in DEGREES:
        if size > num_leaves:
            continue
        roots = []
        for rank in range(size):
            owned = tree.owned(rank, size)
            part = slice(bounds[owned[0]][0], bounds[owned[-1]][1])
            roots.append(impl.row_linear(x[:, part], w[:, part], len(owned), pack(w[:, part])))
        proof.equal(f"{label} degrees", whole, impl.tree_sum(torch.stack(roots)), at=f"degree {size}")
        proof.reached(f"{label} degree {size}", 1)


def _rows(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    w = normal(1, 512, WIDTH, dtype=dtype)
    pool, anchor = normal(2, max(ROW_COUNTS), WIDTH, dtype=dtype), normal(3, 1, WIDTH, dtype=dtype)
    expected, packed = reference.row_linear(anchor, w, NUM_LEAVES), pack(w)
    proof.equal(f"{label} rows", expected, impl.row_linear(anchor, w, NUM_LEAVES), at="alone")
    proof.rows(f"{label} rows", lambda x: impl.row_linear(x, w, NUM_LEAVES), (pool,), (anchor,))
    proof.rows(f"{label} rows, packed", lambda x: impl.row_linear(x, w, NUM_LEAVES, packed), (pool,), (anchor,))
