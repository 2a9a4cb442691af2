"""Grouped linear on Hopper (Triton): each row has the bits of the Hopper linear with its expert's weight.

Notable: bf16 only; one launch for any spread of rows, nothing read by the host, so that a graph replays it for another
spread. The tile comes from `tiles.json` by the rows of a mean expert and changes no bit. The gradients are two launches
of the same kind, one accumulator for each element.
"""

from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from skyrl_isoexec.kernels.experts import spec
from skyrl_isoexec.kernels.experts.triton_loops import grouped, grouped_tma, weight_gradient
from skyrl_isoexec.kernels.numeric.sm90 import EXACT, needs_grad, power_of_two, require, require_bf16
from skyrl_isoexec.kernels.numeric.sm90_product import Tile, is_aligned, num_processors, rows_of
from skyrl_isoexec.kernels.numeric.sm90_tiles import Table

__all__ = ["grouped_linear"]

TABLE = Table(Path(__file__).parent / "tiles.json")
ACROSS = Tile.parse("rows 128 128 64 w8 s3 x1")
"""How both gradients are cut."""


def _dense(w_ENK: Tensor) -> Tensor:
    """w with contiguous rows, copied only if they are not."""
    return w_ENK if w_ENK.stride(2) == 1 and w_ENK.stride(1) >= w_ENK.shape[2] else w_ENK.contiguous()


def _is_aligned(x_SK: Tensor, w_ENK: Tensor) -> bool:
    """Whether the copy engine can read x, and w as one matrix."""
    whole = w_ENK.shape[0] == 1 or w_ENK.stride(0) == w_ENK.shape[1] * w_ENK.stride(1)
    return whole and is_aligned(x_SK, w_ENK[0])


def _programs(num_rows: int, num_experts: int, num_n: int, tile: Tile, x: Tensor, is_wide: bool) -> int:
    """Programs that the device holds at a time, or the most tiles that any spread can give, if fewer."""
    occupied = min(num_experts + 2, num_rows)
    most = (num_rows + occupied * (tile.m - 1)) // tile.m * triton.cdiv(num_n, tile.n)
    return max(1, min(num_processors(x.device.index) * tile.resident(is_wide), most))


def forward(x_SK: Tensor, w_ENK: Tensor, starts_E1: Tensor, out_dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """The product under `tile`, by default that of the table. ValueError for a tile that does not suit the shape."""
    x_SK, w_ENK, starts_E1 = rows_of(x_SK), _dense(w_ENK), starts_E1.contiguous()
    (num_rows, num_k), (num_experts, num_n, _) = x_SK.shape, w_ENK.shape
    aligned = _is_aligned(x_SK, w_ENK)
    if tile is None:
        tile = TABLE.choose(triton.cdiv(num_rows, num_experts), num_n, num_k, 1, aligned)
    if not tile.suits(num_n, num_k, 1, aligned) or tile.side:
        raise ValueError(f"grouped_linear: tile '{tile}' does not suit N {num_n}, K {num_k}")
    out = torch.empty(num_rows, num_n, dtype=out_dtype, device=x_SK.device)
    if not out.numel():
        return out
    programs = _programs(num_rows, num_experts, num_n, tile, x_SK, out_dtype == torch.float32)
    options = {"GROUPS": power_of_two(num_experts + 2), "num_warps": tile.warps, "num_stages": tile.stages}
    if tile.kind == "tma":
        w_MK = w_ENK.as_strided((num_experts * num_n, num_k), (w_ENK.stride(1), 1))
        grouped_tma[(programs,)](
            TensorDescriptor.from_tensor(x_SK, [tile.m, tile.k]), TensorDescriptor.from_tensor(w_MK, [tile.n, tile.k]),
            starts_E1, out, num_rows, num_experts, num_n, num_k, BM=tile.m, BN=tile.n, BK=tile.k, **options, **EXACT,
        )  # fmt: skip
        return out
    grouped[(programs,)](
        x_SK, w_ENK, starts_E1, out, num_rows, num_experts, num_n, num_k, x_SK.stride(0), w_ENK.stride(0),
        w_ENK.stride(1), BM=tile.m, BN=tile.n, BK=tile.k, SWAP=tile.kind == "swap", ACROSS=False,
        WHOLE=num_k % tile.k == 0, **options, **EXACT,
    )  # fmt: skip
    return out


def gradients(
    dy_SN: Tensor, x_SK: Tensor, w_ENK: Tensor, starts_E1: Tensor, needs: tuple[bool, bool], tile: Tile = ACROSS
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients for x and for w, where needed, each rounded once; no atomics, so repeatable."""
    dy_SN, x_SK = rows_of(dy_SN.to(x_SK.dtype)), rows_of(x_SK)
    w_ENK, starts_E1 = _dense(w_ENK), starts_E1.contiguous()
    (num_rows, num_k), (num_experts, num_n, _) = x_SK.shape, w_ENK.shape
    dx, dw = None, None
    if needs[0]:
        dx = torch.empty(num_rows, num_k, dtype=x_SK.dtype, device=x_SK.device)
        if dx.numel():
            grouped[(_programs(num_rows, num_experts, num_k, tile, x_SK, False),)](
                dy_SN, w_ENK, starts_E1, dx, num_rows, num_experts, num_k, num_n, dy_SN.stride(0), w_ENK.stride(0),
                w_ENK.stride(1), BM=tile.m, BN=tile.n, BK=tile.k, SWAP=False, ACROSS=True,
                WHOLE=num_n % tile.k == 0, GROUPS=power_of_two(num_experts + 2), num_warps=tile.warps,
                num_stages=tile.stages, **EXACT,
            )  # fmt: skip
    if needs[1]:
        dw = torch.empty(num_experts, num_n, num_k, dtype=w_ENK.dtype, device=x_SK.device)
        weight_gradient[(triton.cdiv(num_n, tile.m) * triton.cdiv(num_k, tile.n), num_experts)](
            dy_SN, x_SK, starts_E1, dw, num_rows, num_n, num_k, dy_SN.stride(0), x_SK.stride(0),
            BN=tile.m, BK=tile.n, BM=tile.k, num_warps=tile.warps, num_stages=tile.stages, **EXACT,
        )  # fmt: skip
    return dx, dw


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SK, w_ENK, starts_E1, out_dtype):
        ctx.save_for_backward(x_SK, w_ENK, starts_E1)
        return forward(x_SK, w_ENK, starts_E1, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_SN):
        return *gradients(dy_SN, *ctx.saved_tensors, ctx.needs_input_grad[:2]), None, None


def grouped_linear(x_SK: Tensor, w_ENK: Tensor, starts_E1: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """y_SN in `out_dtype` (x's by default). Refuses what `spec` refuses, and fp32 operands.

    The host does not look at the values of `starts`: on the device those outside the rows are held within them, and
    where they descend the result is undefined.
    """
    out_dtype = spec.check(x_SK, w_ENK, starts_E1, out_dtype)
    require_bf16("grouped_linear", x_SK, w_ENK)
    require("grouped_linear", starts_E1)
    if needs_grad(x_SK, w_ENK):
        return _GroupedLinear.apply(x_SK, w_ENK, starts_E1, out_dtype)
    return forward(x_SK, w_ENK, starts_E1, out_dtype)
