"""Latent attention on Hopper: the tiles of `warp_groups.py` and `loops_sm90.py`, and `heads_sm90.py`, behind the
functions that every implementation has.

Notable: a sequence's softmax has blocks of `schedule.kv_block` inside partitions of `schedule.kv_partition`, merged in
ascending order, whoever computes them: a tile of a prefill loops over partitions, a decode step may give them programs
of their own. The choice follows from the shapes of a call, never from the contents of a tensor, so a call can be
captured in a graph and never waits for the device. Keys must be finite in their latent: as a value, a NaN reaches
earlier rows of its block.

Shapes: T tokens, N query heads of a rank, L latent rank, Q = L + width of the rotated part, K and M input and output
features of a head, R requests, P pages of the cache.
"""

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.mla import grouped_sm90 as grouped
from skyrl_isoexec.kernels.mla import loops_sm90 as loops
from skyrl_isoexec.kernels.mla import spec
from skyrl_isoexec.kernels.mla.backward_sm90 import differentiable
from skyrl_isoexec.kernels.mla.heads_sm90 import TILES as HEAD_TILES
from skyrl_isoexec.kernels.mla.heads_sm90 import heads as forward_heads
from skyrl_isoexec.kernels.mla.spec import mla_cache_shape
from skyrl_isoexec.kernels.numeric.sm90 import EXACT, needs_grad, power_of_two, require, require_bf16
from skyrl_isoexec.kernels.numeric.sm90_product import num_processors
from skyrl_isoexec.schedule import Schedule

__all__ = ["HEAD_TILES", "forward_heads", "head_linear", "mla", "mla_cache_shape", "mla_paged", "write_latent"]

LOG2_E = 1.4426950408889634
WAVES = 2
"""Programs per multiprocessor below which the partitions of a decode step get programs of their own."""
LARGEST = 512
"""The widest latent whose accumulator for 64 rows fits into the registers of a multiprocessor."""
Choice = tuple[int, int, int]
GROUPED: Choice = (64, 12, 2)
"""The tile of `warp_groups.py`."""
TILES: tuple[Choice, ...] = ((16, 4, 2), (32, 4, 2), (64, 4, 2), (64, 8, 2), GROUPED)
"""(rows, warps, stages) of tiles: they change no bit."""


def _has_registers(tile: Choice, latent: int) -> bool:
    """Whether the accumulator of a tile fits into its registers: 128 of a thread's 255."""
    rows, warps, _stages = tile
    return rows * power_of_two(latent) <= warps * 32 * 128


def fits(tile: Choice, latent: int, width: int, schedule: Schedule) -> bool:
    """Whether a tile holds such keys."""
    if tile == GROUPED:
        return grouped.is_grouped(latent, width, 0, schedule)
    return _has_registers(tile, latent)


def _is_grouped(choice: Choice | None, latent: int, width: int, page_size: int, schedule: Schedule) -> bool:
    """Whether a call gets the tile of `warp_groups.py`; refuses (ValueError) it for keys that it does not hold."""
    is_held = grouped.is_grouped(latent, width, page_size, schedule)
    if choice == GROUPED and not is_held:
        raise ValueError(
            f"mla: the tile {GROUPED} holds no keys of {latent} + {width - latent} in these blocks and pages"
        )
    return is_held and choice in (None, GROUPED)


def tile_of(num_rows: int, latent: int) -> Choice:
    """The tile of `loops_sm90.py` for requests of about `num_rows` rows, each a token's head."""
    if num_rows <= 32:
        return (16, 4, 2) if num_rows <= 16 else (32, 4, 2)
    return (64, 4, 2) if _has_registers((64, 4, 2), latent) else (64, 8, 2)


def check_order(schedule: Schedule, latent: int, width: int) -> None:
    if schedule.kv_block not in (16, 32, 64) or schedule.kv_partition % schedule.kv_block:
        raise ValueError(f"mla: the sm90 implementation has no kv_block {schedule.kv_block}; it has 16, 32 and 64")
    if latent > LARGEST or width - latent > 128:
        raise ValueError(
            f"mla: the sm90 implementation has no keys of {latent} + {width - latent}, only up to {LARGEST} + 128"
        )


def _fixed(num_heads: int, latent: int, width: int, schedule: Schedule) -> dict[str, int]:
    """What a kernel is compiled for: heads and widths, the last two as a tile has them, blocks and partitions."""
    rotated = width - latent
    widths = {"LW": max(16, power_of_two(latent)), "RW": max(16, power_of_two(rotated))}
    parts = {"BKV": schedule.kv_block, "PART": schedule.kv_partition}
    return {"N": num_heads, "L": latent, "R": rotated} | widths | parts


def _attend(
    q: Tensor, c: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, out: Tensor, lse: Tensor, scale: float,
    shortest: int, page: int, is_lse: bool, fixed: dict[str, int], choice: Choice,
) -> None:  # fmt: skip
    """Run the tiled kernel over all rows: one program for each multiprocessor, or for each tile."""
    rows, warps, stages = choice
    num_requests = starts.shape[0] - 1
    num_tiles = q.shape[0] * q.shape[1] // rows + num_requests
    programs = min(num_tiles, num_processors(q.device.index))
    scratch = torch.empty(programs, rows, fixed["LW"], dtype=torch.float32, device=q.device)
    loops.attend[(programs,)](
        q, c, table, starts, lengths, out, lse, scratch, num_requests, num_tiles, table.stride(0), shortest,
        scale * LOG2_E, BM=rows, PAGE=page, LSE=is_lse, num_warps=warps, num_stages=stages, **fixed, **EXACT,
    )  # fmt: skip


def forward(
    q_TNQ: Tensor, c_TQ: Tensor, cu_seqlens: Tensor, scale: float, latent: int, schedule: Schedule,
    choice: Choice | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [T, N, L], logarithm to base 2 of the denominator, fp32 [T, N]) of packed sequences."""
    q_TNQ, c_TQ, starts = q_TNQ.contiguous(), c_TQ.contiguous(), cu_seqlens.to(torch.int32).contiguous()
    num_tokens, num_heads, width = q_TNQ.shape
    out = q_TNQ.new_empty(num_tokens, num_heads, latent)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q_TNQ.device)
    if num_tokens:
        if _is_grouped(choice, latent, width, 0, schedule):
            grouped.packed(q_TNQ, c_TQ, starts, out, lse, scale, latent, schedule)
            return out, lse
        fixed = _fixed(num_heads, latent, width, schedule)
        choice = choice or tile_of(num_tokens * num_heads // (starts.shape[0] - 1), latent)
        _attend(q_TNQ, c_TQ, starts, starts, starts, out, lse, scale, 0, 0, True, fixed, choice)
    return out, lse


def _forward(
    q_TNQ: Tensor, c_TQ: Tensor, cu_seqlens: Tensor, scale: float, latent: int, schedule: Schedule
) -> tuple[Tensor, Tensor]:
    require_bf16("mla", q_TNQ, c_TQ)
    require("mla", cu_seqlens)
    whole = torch.tensor([0, q_TNQ.shape[0]])  # the bounds themselves stay on the device
    spec.check_rows(q_TNQ, c_TQ, whole, latent, schedule)
    check_order(schedule, latent, q_TNQ.shape[2])
    return forward(q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule)


def mla(
    q_TNQ: Tensor, c_TQ: Tensor, cu_seqlens: Tensor, scale: float, latent: int, *, schedule: Schedule
) -> Tensor:  # fmt: skip
    """o_TNL of causal latent attention over packed sequences; differentiable. Refuses `spec.check_rows`, and fp32."""
    return differentiable(_forward, q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule)


def write_latent(c_TQ: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Store each row at slot page * page_size + offset; rows with a slot outside the cache are skipped."""
    spec.check_write(c_TQ, cache, slots_T)
    require_bf16("mla", c_TQ, cache)
    require("mla", slots_T)
    num_pages, page_size, width = cache.shape
    if slots_T.shape[0]:
        loops.store[(slots_T.shape[0],)](
            c_TQ.contiguous(), cache, slots_T.contiguous(), num_pages * page_size, Q=width, WIDTH=power_of_two(width),
            **EXACT,
        )  # fmt: skip


def paged(
    q_TNQ: Tensor, cache: Tensor, block_table: Tensor, query_start: Tensor, seq_lens: Tensor, scale: float, latent: int,
    out: Tensor, schedule: Schedule, choice: Choice | None = None, split: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention over pages under a tile and a number of programs per decode row, by default those of the shape.

    Where `split` is above 0, all rows of a pure decode step, and otherwise requests of at most a tile's rows, go to the
    split kernels, all others to the tiled one.
    """
    num_tokens, num_heads, width = q_TNQ.shape
    page_size, num_requests = cache.shape[1], seq_lens.shape[0]
    if not num_tokens or not num_requests:
        return out
    if _is_grouped(choice, latent, width, page_size, schedule):
        return grouped.paged(
            q_TNQ, cache, block_table, query_start, seq_lens, scale, latent, out, schedule, split
        )  # fmt: skip
    fixed = _fixed(num_heads, latent, width, schedule)
    rows, warps, stages = choice or tile_of(num_heads, latent)
    num_parts = triton.cdiv(block_table.shape[1] * page_size, schedule.kv_partition)
    if split is None:
        wanted = WAVES * num_processors(cache.device.index)
        split = min(num_parts, triton.cdiv(wanted, num_requests)) if num_requests < wanted and num_parts > 1 else 0
    shortest = 0
    if split:
        is_decode = num_tokens <= num_requests
        shape = (num_tokens * num_heads if is_decode else num_requests * rows, num_parts)
        maxima, sums = (torch.empty(shape, dtype=torch.float32, device=cache.device) for _ in range(2))
        accs = torch.empty(*shape, fixed["LW"], dtype=torch.float32, device=cache.device)
        shortest = num_tokens * num_heads if is_decode else rows
        loops.attend_split[(num_requests, split)](
            q_TNQ, cache, block_table, query_start, seq_lens, maxima, sums, accs, num_parts, shortest,
            block_table.stride(0), scale * LOG2_E, BM=rows, PAGE=page_size, BY_TOKEN=is_decode,
            num_warps=warps, num_stages=stages, **fixed, **EXACT,
        )  # fmt: skip
        grouped.merge(
            maxima, sums, accs, query_start, seq_lens, out, shortest, schedule.kv_partition, rows, is_decode
        )  # fmt: skip
        if is_decode:
            return out
    choice = choice or tile_of(triton.cdiv(num_tokens, num_requests) * num_heads, latent)
    _attend(
        q_TNQ, cache, block_table, query_start, seq_lens, out, out, scale, shortest, page_size, False, fixed, choice
    )
    return out


def mla_paged(
    q_TNQ: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    latent: int,
    out: Tensor | None = None,
    *,
    schedule: Schedule,
) -> Tensor:
    """Causal latent attention of the last rows of each request over its pages.

    Refuses what `spec.check_paged` refuses, fp32, and sizes that no tile has.
    """
    spec.check_paged(q_TNQ, cache, block_table, query_start, seq_lens, latent, out, schedule)
    require_bf16("mla", q_TNQ, cache)
    require("mla", block_table, query_start, seq_lens)
    check_order(schedule, latent, q_TNQ.shape[2])
    out = q_TNQ.new_zeros(*q_TNQ.shape[:2], latent) if out is None else out
    return paged(q_TNQ.contiguous(), cache, block_table, query_start, seq_lens, scale, latent, out, schedule)


class _HeadLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TNK, w_NMK):
        ctx.save_for_backward(x_TNK, w_NMK)
        return forward_heads(x_TNK, w_NMK)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TNM):
        x_TNK, w_NMK = ctx.saved_tensors
        dy_NTM = dy_TNM.to(x_TNK.dtype).transpose(0, 1)
        dx = torch.bmm(dy_NTM, w_NMK).transpose(0, 1) if ctx.needs_input_grad[0] else None
        dw = torch.bmm(dy_NTM.mT, x_TNK.transpose(0, 1)) if ctx.needs_input_grad[1] else None
        return dx, dw


def head_linear(x_TNK: Tensor, w_NMK: Tensor) -> Tensor:
    """y_TNM: head n's rows times its own weight, rounded once; differentiable. Refuses as `spec.check_heads`, and fp32.

    Gradients are two cuBLAS products of bf16 operands.
    """
    spec.check_heads(x_TNK, w_NMK)
    require_bf16("mla", x_TNK, w_NMK)
    return _HeadLinear.apply(x_TNK, w_NMK) if needs_grad(x_TNK, w_NMK) else forward_heads(x_TNK, w_NMK)
