"""Proof of a row-parallel linear: its sum over K is one tree, whoever owns which leaves, whatever rows are beside.

Where the tensor core hides the order inside a leaf (`definition` None), a leaf is the root of a tree of one leaf, the
tree is the reference's over such leaves, and every admitted tile must give it.
"""

from collections.abc import Callable, Mapping
from types import ModuleType

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import panels
from skyrl_isoexec.kernels.numeric.bound import product_bound
from skyrl_isoexec.kernels.numeric.inputs import count_hazards, hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DEGREES, DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.kernels.row_linear import reference
from skyrl_isoexec.kernels.row_linear.cases import NUM_LEAVES, cases
from skyrl_isoexec.schedule import ReductionTree, Schedule

WIDTH = 2048
"""Inputs of the linear in which a row is moved about."""
LEAVES = (1, 2, 4, NUM_LEAVES)
TILED = ((192, 2048), (96, 1088))
"""(N, K) on which every tile of a table is proved; leaves of the second are not whole blocks of K."""


def prove(
    proof: Proof,
    impl: ModuleType,
    schedule: Schedule,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    definition: ModuleType | None = reference,
) -> None:
    """Collect every check of `impl` in `proof`, for a tree of the schedule's leaves."""
    hides = definition is None
    definition, pack = (Leaves(impl), lambda _: None) if hides else (definition, panels.pack)
    for label, dtype in dtypes.items():
        _reference(proof, impl, definition, pack, label, dtype)
        if hides:
            _tensor_core(proof, impl, definition, label, dtype)
        _degrees(proof, impl, definition, pack, label, dtype, schedule.num_leaves)
        x, w = normal(1, 5, 512, dtype=dtype), normal(2, 70, 512, dtype=dtype)
        whole, packed = impl.row_linear(x, w, NUM_LEAVES), pack(w)
        proof.autograd(f"{label} autograd", lambda x, w: impl.row_linear(x, w, NUM_LEAVES), x, w)
        wide = torch.cat([x, x], 1)[:, :512]
        proof.equal(f"{label} strides", whole, impl.row_linear(wide, w.t().contiguous().t(), NUM_LEAVES))
        proof.repeats(f"{label} repeats", lambda x=x, w=w, p=packed: impl.row_linear(x, w, NUM_LEAVES, p))
        _rows(proof, impl, definition, pack, label, dtype)
    parts = hazards(7, 8, 9, 20, finite=False)
    proof.reached("tree: NaN parts", parts.isnan().sum())
    for count in DEGREES:
        proof.equal("tree", reference.tree_sum(parts[:count]), impl.tree_sum(parts[:count]), at=f"{count} parts")
    proof.autograd("tree, autograd", impl.tree_sum, normal(1, 4, 3, 5))


class Leaves:
    """The reference's tree over leaves that an implementation computes one by one."""

    def __init__(self, impl: ModuleType) -> None:
        self._impl = impl

    def row_linear(self, x: Tensor, w: Tensor, num_leaves: int) -> Tensor:
        """fp32 root [T, N]."""
        leaves = zip(x.chunk(num_leaves, 1), w.chunk(num_leaves, 1), strict=True)
        return reference.tree_sum(torch.stack([self._impl.row_linear(a, b, 1) for a, b in leaves]))


def _tensor_core(proof: Proof, impl: ModuleType, definition: Leaves, label: str, dtype: torch.dtype) -> None:
    """Bound and every tile of the table, for every number of leaves."""
    for n, k in TILED:
        x, w = normal(1, 257, k, dtype=dtype), normal(2, n, k, dtype=dtype)
        for leaves in LEAVES:
            root, at = definition.row_linear(x, w, leaves), f"{n} x {k}, {leaves} leaves"
            proof.within(f"{label} within the bound", root, *product_bound(x, w, leaves), at=at)
            for tile in impl.TABLE.tiles(n, k, leaves, True):
                proof.equal(f"{label} tiles", root, impl.forward(x, w, leaves, tile), at=f"{at}, {tile}")
                rounded = impl.forward(x, w, leaves, tile, dtype)
                proof.equal(f"{label} rounded", root.to(dtype), rounded, at=f"{at}, {tile}")


def _reference(
    proof: Proof, impl: ModuleType, definition: ModuleType, pack: Callable, label: str, dtype: torch.dtype
) -> None:
    for name, (x, w) in cases(dtype).items():
        for leaves in (1, 2, 4, NUM_LEAVES):
            expected = definition.row_linear(x, w, leaves)
            plain, packed = impl.row_linear(x, w, leaves), impl.row_linear(x, w, leaves, pack(w))
            if name == "no rows":
                proof.empty(f"{label} no rows", (expected, expected), (plain, packed))
                continue
            proof.equal(f"{label} reference", expected, plain, at=f"{name}, {leaves} leaves")
            proof.equal(f"{label} reference", expected, packed, at=f"{name}, {leaves} leaves, packed")
            rounded = impl.row_linear(x, w, leaves, pack(w), dtype)
            proof.equal(f"{label} rounded", expected.to(dtype), rounded, at=f"{name}, {leaves} leaves")
        for hazard, count in count_hazards(x).items() if "hazards" in name else ():
            proof.reached(f"{label} {name}: {hazard}", count)


def _degrees(
    proof: Proof,
    impl: ModuleType,
    definition: ModuleType,
    pack: Callable,
    label: str,
    dtype: torch.dtype,
    num_leaves: int,
) -> None:
    """Ranks own subtrees of the leaves; their roots finish the tree."""
    x, w = normal(1, 33, 512, dtype=dtype), normal(2, 70, 512, dtype=dtype)
    whole, tree = definition.row_linear(x, w, num_leaves), ReductionTree(num_leaves=num_leaves)
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


def _rows(
    proof: Proof, impl: ModuleType, definition: ModuleType, pack: Callable, label: str, dtype: torch.dtype
) -> None:
    w = normal(1, 512, WIDTH, dtype=dtype)
    pool, anchor = normal(2, max(ROW_COUNTS), WIDTH, dtype=dtype), normal(3, 1, WIDTH, dtype=dtype)
    expected, packed = definition.row_linear(anchor, w, NUM_LEAVES), pack(w)
    proof.equal(f"{label} rows", expected, impl.row_linear(anchor, w, NUM_LEAVES), at="alone")
    proof.rows(f"{label} rows", lambda x: impl.row_linear(x, w, NUM_LEAVES), (pool,), (anchor,))
    proof.rows(f"{label} rows, packed", lambda x: impl.row_linear(x, w, NUM_LEAVES, packed), (pool,), (anchor,))
