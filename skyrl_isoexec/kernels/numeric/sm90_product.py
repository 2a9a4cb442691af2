"""The matrix product on Hopper that every linear is made of: x w^T with K ascending, leaves of K, a balanced tree.

Notable: an element has one fp32 accumulator per leaf of K, which the tensor core fills in ascending k; leaves are added
by a balanced tree inside the kernel, or, where a tile splits them over programs, by the same tree in a second kernel.
What must stay equal: the bits, under every tile. A tile (rows, columns, depth, operands swapped, loads through pointers
or the tensor copy engine, warps, stages, split) decides only which elements are computed together.

Shapes: M rows, N columns, K depth, S programs that share one element's leaves.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from skyrl_isoexec.kernels.numeric.sm90 import EXACT, SUM_TYPE, dot, narrow, widen

GROUP = 8
"""Tile rows that neighbouring programs share, so that the weight is read from the L2 cache."""
MAX_LEAVES = 8
"""Leaves one program adds; more are split over programs."""
SHARED_BYTES, ACCUMULATORS = 232_448, 128 * 256
"""Shared memory of a multiprocessor, and elements of tiles whose accumulators fit into its registers."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a product is cut; changes no bit."""

    kind: str
    """"rows": pointers; "swap": pointers, the weight as the tall operand; "tma": copy engine, persistent programs."""
    m: int
    n: int
    k: int
    warps: int
    stages: int
    split: int = 1
    """Programs that share the leaves of one element; a power of two, at most the number of leaves."""

    def __str__(self) -> str:
        return f"{self.kind} {self.m} {self.n} {self.k} w{self.warps} s{self.stages} x{self.split}"

    @classmethod
    @cache
    def parse(cls, text: str) -> "Tile":
        """The inverse of str(); ValueError for anything else."""
        try:
            kind, m, n, k, warps, stages, split = text.split()
            made = cls(
                kind=kind, m=int(m), n=int(n), k=int(k),
                warps=int(warps[1:]), stages=int(stages[1:]), split=int(split[1:]),
            )  # fmt: skip
        except (ValueError, IndexError):
            made = None
        if made is None or str(made) != text or made.kind not in ("rows", "swap", "tma"):
            raise ValueError(f"product: {text!r} is not a tile such as 'tma 128 256 64 w8 s3 x1'")
        return made

    def suits(self, num_n: int, num_k: int, num_leaves: int, aligned: bool) -> bool:
        """Whether the tile computes a product of this shape; `aligned`: rows start at multiples of 16 bytes."""
        leaves = num_leaves // self.split
        if not 0 < leaves <= MAX_LEAVES or (leaves > 1 and self.m * self.n > self.warps * self.held(leaves)):
            return False
        if self.kind != "tma":
            return True
        whole = num_leaves == 1 or num_k // num_leaves % self.k == 0  # past a leaf's end lies the next leaf
        return aligned and num_n % 8 == 0 and self.split == 1 and whole and (num_leaves == 1 or not self.side)

    def held(self, leaves: int) -> int:
        """Elements of a tile for each warp so that the nodes of a tree which wait beside a leaf fit into registers."""
        return 4096 if leaves == 2 else 2048 if self.kind == "tma" else 1024

    @property
    def side(self) -> int:
        """Columns of the second accumulator: a third of a number of columns that is 3 times a power of two, else 0."""
        return self.n // 3 if self.n % 3 == 0 else 0

    def width(self, is_wide: bool) -> int:
        """Columns that the copy engine stores at once; `is_wide`: of fp32, a tile of which is stored in halves."""
        return self.side or (self.n // 2 if is_wide and self.n > 16 else self.n)

    def resident(self, is_wide: bool) -> int:
        """Programs that one multiprocessor holds at a time, by their shared memory and accumulators."""
        stored = self.m * self.width(is_wide) * (4 if is_wide else 2)
        shared = 2 * self.stages * (self.m + self.n) * self.k + stored + 1024
        return max(1, min(SHARED_BYTES // shared, ACCUMULATORS // (self.m * self.n), 4))


@triton.jit
def _place(tile, num_m, num_n, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(tile row, tile column) of the tile with a number, GROUP tile rows at a time."""
    rows, columns = tl.cdiv(num_m, BM), tl.cdiv(num_n, BN)
    width = GROUP * columns
    first = tile // width * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + tile % width % height, tile % width // height


@triton.jit
def leaf_sum(
    x, w, rows, columns, stride_x, stride_w, first, depth,
    BK: tl.constexpr, SWAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """fp32 sum over k in [first, first + depth), ascending; WHOLE: depth is a multiple of BK."""
    k = tl.arange(0, BK)
    if WHOLE:
        first = tl.multiple_of(first, BK)
    if SWAP:
        acc = tl.zeros((columns.shape[0], rows.shape[0]), SUM_TYPE)
    else:
        acc = tl.zeros((rows.shape[0], columns.shape[0]), SUM_TYPE)
    for start in range(0, depth, BK):
        at = first + start + k
        if SWAP:
            left, right = w + columns[:, None] * stride_w + at[None, :], x + rows[None, :] * stride_x + at[:, None]
        else:
            left, right = x + rows[:, None] * stride_x + at[None, :], w + columns[None, :] * stride_w + at[:, None]
        if WHOLE:
            acc = dot(tl.load(left), tl.load(right), acc)
        else:
            there = start + k < depth
            acc = dot(tl.load(left, there[None, :], other=0.0), tl.load(right, there[:, None], other=0.0), acc)
    return acc.to(tl.float32)


@triton.jit
def _rounded(sums, bias, columns, num_n, dtype: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr):
    """The sums rounded to `dtype`; with a bias, it is added to the rounded value and the sum is rounded again."""
    y = narrow(sums, dtype)
    if BIAS:
        b = widen(tl.load(bias + columns, mask=columns < num_n, other=0.0))
        y = narrow(widen(y) + (b[:, None] if SWAP else b[None, :]), dtype)
    return y


@triton.jit(do_not_specialize=["num_m"])  # one program for every number of rows
def _product(
    x, w, bias, out, num_m, num_n, depth, stride_x, stride_w,
    LEAVES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
    WHOLE: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of one subtree: LEAVES leaves of `depth` from leaf LEAVES * program_id(1)."""
    tile_m, tile_n = _place(tl.program_id(0), num_m, num_n, BM, BN, GROUP)
    part = tl.program_id(1)
    rows, columns = (tile_m * BM + tl.arange(0, BM)).to(tl.int64), (tile_n * BN + tl.arange(0, BN)).to(tl.int64)
    at_rows, at_columns = tl.minimum(rows, num_m - 1), tl.minimum(columns, num_n - 1)
    for leaf in tl.static_range(LEAVES):
        first = (part * LEAVES + leaf) * depth
        node = leaf_sum(x, w, at_rows, at_columns, stride_x, stride_w, first, depth, BK, SWAP, WHOLE)
        if leaf % 2 == 0:
            left_1 = node
        else:
            node = left_1 + node
            if leaf % 4 == 1:
                left_2 = node
            else:
                node = left_2 + node
                if leaf % 8 == 3:
                    left_4 = node
                else:
                    node = left_4 + node
    y = _rounded(node, bias, columns, num_n, out.dtype.element_ty, SWAP, BIAS)
    out += part.to(tl.int64) * num_m * num_n
    if SWAP:
        there = (columns[:, None] < num_n) & (rows[None, :] < num_m)
        tl.store(out + rows[None, :] * num_n + columns[:, None], y, mask=there)
    else:
        there = (rows[:, None] < num_m) & (columns[None, :] < num_n)
        tl.store(out + rows[:, None] * num_n + columns[None, :], y, mask=there)


@triton.jit
def _store_tma(out, y, row, column, WIDTH: tl.constexpr):
    """Store a tile through the copy engine, whole or in two halves of WIDTH columns, which need half the memory."""
    if y.shape[1] == WIDTH:
        out.store([row, column], y)
    else:
        left, right = tl.split(tl.permute(tl.reshape(y, (y.shape[0], 2, WIDTH)), (0, 2, 1)))
        out.store([row, column], left)
        out.store([row, column + WIDTH], right)


@triton.jit(do_not_specialize=["num_m"])
def _product_tma(
    x, w, side, bias, out, scratch, num_m, num_n, depth,
    LEAVES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SIDE: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """As `_product`, through the copy engine: a program computes every num_programs(0)-th tile, leaf by leaf.

    A tile has BN + SIDE columns, in two accumulators. The left operands of the tree that wait are `left_1` and `left_2`
    in registers, and the first half of eight leaves, longest of all, in the program's part of `scratch`.
    """
    num_tiles = tl.cdiv(num_m, BM) * tl.cdiv(num_n, BN + SIDE)
    mine = tl.cdiv(num_tiles - tl.program_id(0), tl.num_programs(0))
    if LEAVES > 1:
        left_1, left_2 = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for item in tl.range(0, mine * LEAVES, flatten=LEAVES == 1):
        tile, leaf = tl.program_id(0) + item // LEAVES * tl.num_programs(0), item % LEAVES
        tile_m, tile_n = _place(tile, num_m, num_n, BM, BN + SIDE, GROUP)
        row, column = tile_m * BM, tile_n * (BN + SIDE)
        node = tl.zeros((BM, BN), SUM_TYPE)
        if SIDE:
            beside = tl.zeros((BM, SIDE), SUM_TYPE)
        for start in range(0, depth, BK):
            at = leaf * depth + start
            left = x.load([row, at])
            node = dot(left, w.load([column, at]).T, node)
            if SIDE:
                beside = dot(left, side.load([column + BN, at]).T, beside)
        node = node.to(tl.float32)
        if LEAVES == 1:
            y = _rounded(node, bias, column + tl.arange(0, BN), num_n, DTYPE, False, BIAS)
            _store_tma(out, y, row, column, WIDTH)
            if SIDE:
                columns = column + BN + tl.arange(0, SIDE)
                y = _rounded(beside.to(tl.float32), bias, columns, num_n, DTYPE, False, BIAS)
                _store_tma(out, y, row, column + BN, WIDTH)
        elif leaf % 2 == 0:
            left_1 = node
        else:
            node = left_1 + node
            if LEAVES == 2:
                _store_tma(out, narrow(node, DTYPE), row, column, WIDTH)
            elif leaf % 4 == 1:
                left_2 = node
            else:
                node = left_2 + node
                if LEAVES == 4:
                    _store_tma(out, narrow(node, DTYPE), row, column, WIDTH)
                else:
                    at = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None] * BN + tl.arange(0, BN)[None, :]
                    if leaf == 3:
                        tl.store(scratch + at, node)
                        tl.debug_barrier()
                    else:
                        _store_tma(out, narrow(tl.load(scratch + at) + node, DTYPE), row, column, WIDTH)


@triton.jit
def _tree_sum(parts, out, size, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """out = balanced tree over the NUM rows of `parts`, neighbours first, rounded once to out's type."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, NUM).to(tl.int64)
    x = tl.load(parts + row[:, None] * size + at[None, :], mask=at[None, :] < size, other=0.0)
    for step in tl.static_range(1, 12):
        if (NUM >> step) >= 1:
            x = tl.sum(tl.reshape(x, (NUM >> step, 2, BLOCK)), axis=1)
    tl.store(out + at, narrow(tl.reshape(x, (BLOCK,)), out.dtype.element_ty), mask=at < size)


@cache
def num_processors(index: int | None) -> int:
    """Multiprocessors of a device; 1 for the interpreter."""
    return 1 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def tree_sum(parts: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """Sum over the first dimension (a power of two) by the balanced tree, lower index on the left; rounded once."""
    if parts.shape[0] == 1:
        return parts[0].to(out_dtype)
    parts = parts.contiguous()
    out = torch.empty(parts.shape[1:], dtype=out_dtype, device=parts.device)
    size, num = out.numel(), parts.shape[0]
    block = max(16, 4096 // num)
    if size:
        _tree_sum[(triton.cdiv(size, block),)](parts, out, size, num, block, num_warps=4, **EXACT)
    return out


def rows_of(x: Tensor) -> Tensor:
    """x with contiguous rows, copied only if they are not."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def is_aligned(*operands: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes, as the copy engine needs."""
    return all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in operands)


def product(
    x_MK: Tensor, w_NK: Tensor, out_dtype: torch.dtype, tile: Tile, *, bias_N: Tensor | None = None, num_leaves: int = 1
) -> Tensor:
    """x w^T rounded once to `out_dtype`, then + bias, rounded again. The caller has checked shapes and types.

    Rows of both operands are contiguous (`rows_of`); ValueError for a tile that does not suit the shape.
    """
    (num_m, num_k), num_n = x_MK.shape, w_NK.shape[0]
    if not tile.suits(num_n, num_k, num_leaves, tile.kind != "tma" or is_aligned(x_MK, w_NK)):
        raise ValueError(f"product: tile '{tile}' does not suit N {num_n}, K {num_k} in {num_leaves} leaves")
    if tile.split > 1 and bias_N is not None:
        raise ValueError(f"product: tile '{tile}' splits leaves, so it adds no bias")
    shape = (num_m, num_n) if tile.split == 1 else (tile.split, num_m, num_n)
    out = torch.empty(shape, dtype=out_dtype if tile.split == 1 else torch.float32, device=x_MK.device)
    num_tiles = triton.cdiv(num_m, tile.m) * triton.cdiv(num_n, tile.n)
    if not num_tiles:
        return out if tile.split == 1 else out[0].to(out_dtype)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    bias, leaves = out if bias_N is None else bias_N, num_leaves // tile.split
    if tile.kind == "tma":
        is_wide = out_dtype == torch.float32
        programs = min(num_processors(x_MK.device.index) * tile.resident(is_wide), num_tiles)
        main, width = tile.n - tile.side, tile.width(is_wide)
        x, w, side = (
            TensorDescriptor.from_tensor(t, [n, tile.k])
            for t, n in ((x_MK, tile.m), (w_NK, main), (w_NK, tile.side or main))
        )
        scratch = out
        if leaves == MAX_LEAVES:
            scratch = torch.empty(programs, tile.m, main, dtype=torch.float32, device=out.device)
        _product_tma[(programs,)](
            x, w, side, bias, TensorDescriptor.from_tensor(out, [tile.m, width]), scratch, num_m, num_n,
            num_k // num_leaves, LEAVES=leaves, BM=tile.m, BN=main, SIDE=tile.side, BK=tile.k,
            BIAS=bias_N is not None, GROUP=GROUP, DTYPE=tl.float32 if is_wide else tl.bfloat16, WIDTH=width,
            **options, **EXACT,
        )  # fmt: skip
        return out
    _product[(num_tiles, tile.split)](
        x_MK, w_NK, bias, out, num_m, num_n, num_k // num_leaves, x_MK.stride(0), w_NK.stride(0),
        LEAVES=leaves, BM=tile.m, BN=tile.n, BK=tile.k, SWAP=tile.kind == "swap",
        WHOLE=num_k // num_leaves % tile.k == 0, BIAS=bias_N is not None, GROUP=GROUP, **options, **EXACT,
    )  # fmt: skip
    return out if tile.split == 1 else tree_sum(out, out_dtype)


def product_gradients(
    dy_MN: Tensor, x_MK: Tensor, w_NK: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x w^T for x and for w, where needed: cuBLAS products of bf16 operands, repeatable on one device."""
    dy_MN = dy_MN.to(x_MK.dtype)
    return torch.mm(dy_MN, w_NK) if needs[0] else None, torch.mm(dy_MN.t(), x_MK) if needs[1] else None
