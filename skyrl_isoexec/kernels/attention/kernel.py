"""Causal attention on Hopper: `triton_loops.py` and `warp_groups.py` behind the functions every implementation has.

Notable: a sequence's softmax has blocks of `schedule.kv_block` inside partitions of `schedule.kv_partition`, merged in
ascending order, whoever computes them: a tile of a prefill loops over partitions, a decode step may give them programs
of their own. The choice follows from the shapes of a call, never from the contents of a tensor, so a call can be
captured in a graph and never waits for the device. The cache has the shape that `spec` gives it, but keys lie like
values, [K, page_size, D]. Values must be finite: a NaN value reaches earlier rows of its block.

Shapes: T tokens, N query heads, K key-value heads, D head dimension, R requests, P pages of the cache.
"""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from skyrl_isoexec.kernels.attention import spec, warp_groups
from skyrl_isoexec.kernels.attention import triton_loops as loops
from skyrl_isoexec.kernels.attention.backward_sm90 import differentiable
from skyrl_isoexec.kernels.attention.spec import kv_cache_shape
from skyrl_isoexec.kernels.numeric.sm90 import EXACT, INTERPRETED, power_of_two, require, require_bf16
from skyrl_isoexec.kernels.numeric.sm90_product import num_processors
from skyrl_isoexec.kernels.numeric.sm90_strides import whole_tokens
from skyrl_isoexec.schedule import Schedule

__all__ = ["attention", "attention_paged", "kv_cache_shape", "write_kv"]

LOG2_E = 1.4426950408889634
SMALL = 16
"""Rows of a decode tile."""
WAVES = 4
"""Programs per multiprocessor below which the partitions of a decode step get programs of their own."""
WIDTHS = (64, 128, 256)
"""Head dimensions that the tile of `warp_groups` has."""
HELD = 128
"""The largest of them whose running result stays in registers beside the accumulator."""


def check_order(schedule: Schedule, head_dim: int, group: int) -> None:
    if schedule.kv_block not in (16, 32, 64, 128) or schedule.kv_partition % schedule.kv_block:
        raise ValueError(f"attention: the sm90 implementation has no kv_block {schedule.kv_block}")
    if head_dim % 8 or head_dim > 256 or group > 64:
        raise ValueError(f"attention: the sm90 implementation has no head of {head_dim} in groups of {group}")


def tile(num_rows: int, head_dim: int) -> tuple[int, int, int]:
    """(rows, warps, stages) of a prefill tile for requests of about `num_rows` rows: changes no bit."""
    if num_rows <= 64:
        return (16, 4, 3) if num_rows <= 16 else (64, 4, 3 if head_dim <= 128 else 2)
    return (128, 8, 3) if head_dim <= 128 else (64, 8, 3)


def _width(head_dim: int) -> int:
    """Columns of a tile: the tensor core takes 16 at a time."""
    return max(16, power_of_two(head_dim))


def _strides(page_size: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Where a key lies in a cache: [P, 2, K, page_size, D]."""
    return {
        "stride": head_dim,
        "head_stride": page_size * head_dim,
        "page_stride": 2 * num_kv_heads * page_size * head_dim,
    }


def is_grouped(num_rows: int, head_dim: int, group: int, page_size: int, schedule: Schedule) -> bool:
    """Whether requests of about `num_rows` rows get the tile of `warp_groups`; `page_size` 0: keys without pages."""
    whole = group == power_of_two(group) and page_size % schedule.kv_block == 0
    return num_rows > 64 and head_dim in WIDTHS and schedule.kv_block == 64 and whole and not INTERPRETED.value


def stages(head_dim: int) -> tuple[int, int]:
    """Blocks of keys and of values that the tile of `warp_groups` copies ahead: changes no bit."""
    return (4, 4) if head_dim <= HELD else (3, 2)


def _blocks(rows: Tensor, schedule: Schedule, head_dim: int) -> TensorDescriptor:
    """What the copy engine needs to read blocks of positions from [rows, columns]."""
    block = [schedule.kv_block, head_dim]
    return TensorDescriptor.from_tensor(rows, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


def _attend_grouped(
    q_TND: Tensor, keys: Tensor, values: Tensor, table: Tensor, starts: Tensor, seq_lens: Tensor, out: Tensor,
    lse: Tensor | None, scale: float, num_kv_heads: int, page_size: int, shortest: int, schedule: Schedule,
) -> None:  # fmt: skip
    """Run the tile of `warp_groups` over requests of more than `shortest` rows; keys and values are [rows, columns]."""
    num_tokens, num_heads, head_dim = q_TND.shape
    group, num_requests = num_heads // num_kv_heads, starts.shape[0] - 1
    rows, is_held = warp_groups.ROWS, head_dim <= HELD
    k_stages, v_stages = stages(head_dim)
    grid = (num_tokens // (rows // group) + num_requests, num_kv_heads)
    size = 1 if is_held else grid[0] * num_kv_heads * rows * head_dim
    scratch = torch.empty(size, dtype=torch.float32, device=q_TND.device)
    keys, values = (_blocks(x, schedule, head_dim) for x in (keys, values))
    warp_groups.attend[grid](
        q_TND, keys, values, table, starts, seq_lens, out, scratch if lse is None else lse, scratch, num_requests,
        num_tokens, num_heads, table.stride(0) if page_size else 0, scale * LOG2_E, shortest,
        D=head_dim, GROUP=group, BQ=rows // group, BKV=schedule.kv_block, PART=schedule.kv_partition, PAGE=page_size,
        K_STAGES=k_stages, V_STAGES=v_stages, LSE=lse is not None, HELD=is_held, num_warps=4, **EXACT,
    )  # fmt: skip


def forward(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, scale: float, schedule: Schedule,
    choice: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [T, N, D], natural log of the denominator, fp32 [N, T]) of packed sequences."""
    num_tokens, num_heads, head_dim = q_TND.shape
    num_kv_heads = k_TKD.shape[1]
    q_TND, k_TKD, v_TKD = q_TND.contiguous(), k_TKD.contiguous(), v_TKD.contiguous()
    starts = cu_seqlens.to(torch.int32).contiguous()
    num_requests = starts.shape[0] - 1
    out = torch.empty_like(q_TND)
    lse = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=q_TND.device)
    if num_tokens:
        group = num_heads // num_kv_heads
        num_rows = num_tokens * group // num_requests
        if choice is None and is_grouped(num_rows, head_dim, group, 0, schedule):
            keys, values = (x.view(num_tokens, -1) for x in (k_TKD, v_TKD))
            _attend_grouped(
                q_TND, keys, values, starts, starts, starts, out, lse, scale, num_kv_heads, 0, 0, schedule
            )  # fmt: skip
            return out, lse
        rows, warps, stages = choice or tile(num_rows, head_dim)
        rows = max(rows, power_of_two(group))
        loops.attend[(num_tokens // (rows // group) + num_requests, num_kv_heads)](
            q_TND, k_TKD, v_TKD, starts, starts, starts, out, lse, num_requests, num_tokens, num_heads,
            num_kv_heads * head_dim, 0, head_dim, 0, scale * LOG2_E, 0,
            D=head_dim, WIDTH=_width(head_dim), GROUP=group, BQ=rows // group, BM=rows,
            BKV=schedule.kv_block, PART=schedule.kv_partition, PAGE=0, LSE=True, num_warps=warps, num_stages=stages,
            **EXACT,
        )  # fmt: skip
    return out, lse


def _forward(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, scale: float, schedule: Schedule
) -> tuple[Tensor, Tensor]:
    require_bf16("attention", q_TND, k_TKD, v_TKD)
    require("attention", cu_seqlens)
    whole = torch.tensor([0, q_TND.shape[0]])  # the bounds themselves stay on the device
    spec.check_rows(q_TND, k_TKD, v_TKD, whole, schedule)
    check_order(schedule, q_TND.shape[2], q_TND.shape[1] // k_TKD.shape[1])
    return forward(q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule)


def attention(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, scale: float, *, schedule: Schedule
) -> Tensor:
    """Causal attention over packed sequences; differentiable. Refuses what `spec.check_rows` refuses, and fp32."""
    return differentiable(_forward, q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule)


def write_kv(k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Store each row at slot page * page_size + offset; rows with a slot outside the cache are skipped."""
    spec.check_write(k_TKD, v_TKD, cache, slots_T)
    require_bf16("attention", k_TKD, v_TKD, cache)
    require("attention", slots_T)
    k_TKD, v_TKD, slots_T = whole_tokens(k_TKD), whole_tokens(v_TKD), slots_T.contiguous()
    num_pages, _, num_kv_heads, head_dim, page_size = cache.shape
    width, block = num_kv_heads * head_dim, 1024
    if slots_T.shape[0]:
        strides = _strides(page_size, num_kv_heads, head_dim)
        loops.store[(slots_T.shape[0], triton.cdiv(width, block))](
            k_TKD, v_TKD, cache, slots_T, k_TKD.stride(0), v_TKD.stride(0), width, strides["page_stride"],
            strides["page_stride"] // 2, num_pages * page_size, head_dim, strides["head_stride"], PAGE=page_size,
            BLOCK=block, num_warps=4, **EXACT,
        )  # fmt: skip


def paged(
    q_TND: Tensor, cache: Tensor, block_table: Tensor, query_start: Tensor, seq_lens: Tensor, scale: float, out: Tensor,
    schedule: Schedule, choice: tuple[int, int, int] | None = None, split: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention over pages under a prefill tile and a number of programs per decode row, by default those of the shape.

    Where `split` is above 0, all rows of a pure decode step, and otherwise requests of at most a decode tile's rows, go
    to the split kernels, all others to the tiled one.
    """
    num_tokens, num_heads, head_dim = q_TND.shape
    num_kv_heads, page_size, num_requests = cache.shape[2], cache.shape[4], seq_lens.shape[0]
    group, width = num_heads // num_kv_heads, _width(head_dim)
    if not num_tokens or not num_requests:
        return out
    part = schedule.kv_partition
    num_parts = triton.cdiv(block_table.shape[1] * page_size, part)
    small = max(SMALL, power_of_two(group))
    if split is None:
        wanted = WAVES * num_processors(cache.device.index)
        programs = num_requests * num_kv_heads
        split = min(num_parts, triton.cdiv(wanted, programs)) if programs < wanted and num_parts > 1 else 0
    strides = _strides(page_size, num_kv_heads, head_dim) | {"table_stride": block_table.stride(0)}
    fixed = {
        "D": head_dim, "WIDTH": width, "GROUP": group, "BKV": schedule.kv_block, "PART": part, "PAGE": page_size,
    }  # fmt: skip
    half = cache.shape[2] * page_size * head_dim
    keys, values = cache, cache.view(-1)[half:]
    shortest = 0
    if split:
        shortest, is_decode = small // group, num_tokens <= num_requests
        slots = num_tokens if is_decode else num_requests * shortest
        shape = (slots, num_kv_heads, num_parts, group)
        maxima, sums = (torch.empty(shape, dtype=torch.float32, device=cache.device) for _ in range(2))
        accs = torch.empty(*shape, width, dtype=torch.float32, device=cache.device)
        longest = num_tokens if is_decode else shortest
        loops.attend_split[(num_requests, num_kv_heads, split)](
            q_TND, keys, values, block_table, query_start, seq_lens, maxima, sums, accs, num_heads, num_parts, longest,
            scale=scale * LOG2_E, BQ=shortest, BM=small, BY_TOKEN=is_decode, num_warps=4,
            num_stages=5,  # the page of a block is loaded ahead as well
            **strides, **fixed, **EXACT,
        )  # fmt: skip
        loops.merge[(num_requests, num_kv_heads, group)](
            maxima, sums, accs, query_start, seq_lens, out, num_heads, num_parts, longest,
            D=head_dim, WIDTH=width, GROUP=group, BQ=shortest, PART=part, BY_TOKEN=is_decode, num_warps=1,
            **EXACT,
        )  # fmt: skip
        if is_decode:
            return out
    num_rows = triton.cdiv(num_tokens, num_requests) * group
    if choice is None and is_grouped(num_rows, head_dim, group, page_size, schedule):
        rows = cache.view(-1, head_dim)
        _attend_grouped(
            q_TND, rows, rows, block_table, query_start, seq_lens, out, None, scale, num_kv_heads, page_size, shortest,
            schedule,
        )  # fmt: skip
        return out
    rows, warps, stages = choice or tile(num_rows, head_dim)
    rows = max(rows, power_of_two(group))
    loops.attend[(num_tokens // (rows // group) + num_requests, num_kv_heads)](
        q_TND, keys, values, block_table, query_start, seq_lens, out, out, num_requests, num_tokens, num_heads,
        scale=scale * LOG2_E, shortest=shortest, BQ=rows // group, BM=rows, LSE=False,
        num_warps=warps, num_stages=stages + 2,  # the page of a block is loaded ahead as well
        **strides, **fixed, **EXACT,
    )  # fmt: skip
    return out


def attention_paged(
    q_TND: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    *,
    schedule: Schedule,
) -> Tensor:
    """Causal attention of the last rows of each request over its pages. Refuses what `spec.check_paged` refuses."""
    spec.check_paged(q_TND, cache, block_table, query_start, seq_lens, out, schedule)
    require_bf16("attention", q_TND, cache)
    require("attention", block_table, query_start, seq_lens)
    check_order(schedule, q_TND.shape[2], q_TND.shape[1] // cache.shape[2])
    out = torch.zeros_like(q_TND) if out is None else out
    return paged(q_TND.contiguous(), cache, block_table, query_start, seq_lens, scale, out, schedule)
