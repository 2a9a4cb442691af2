"""Launches of `warp_groups.py`: which shapes its tile holds, how a decode step is cut into programs, what they write.

Shapes: T tokens, N query heads of a rank, L latent rank, Q = L + width of the rotated part, R requests.
"""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from skyrl_isoexec.kernels.mla import loops_sm90 as loops
from skyrl_isoexec.kernels.mla import warp_groups
from skyrl_isoexec.kernels.mla.items_sm90 import PARTS, TILES, WHOLE
from skyrl_isoexec.kernels.mla.warp_groups import ROWS
from skyrl_isoexec.kernels.numeric.sm90 import EXACT, INTERPRETED
from skyrl_isoexec.kernels.numeric.sm90_product import num_processors
from skyrl_isoexec.schedule import Schedule

LOG2_E = 1.4426950408889634
LATENT, ROTATED, BLOCK = 512, 64, 64
"""What the tile is made for."""
COLUMNS = 128
"""Of the latent, for a program that merges partitions."""
FULL = 2
"""Requests per multiprocessor of a decode step from which a program merges the partitions of a request itself."""
WAVES = 5
"""Programs per multiprocessor that a decode step may have where partitions are written."""
WRITTEN_BYTES = 1 << 30
"""What partitions may take in memory before they are merged."""


def is_grouped(latent: int, width: int, page_size: int, schedule: Schedule) -> bool:
    """Whether the tile holds such keys; `page_size` 0: keys without pages."""
    is_held = (latent, width - latent, schedule.kv_block) == (LATENT, ROTATED, BLOCK)
    return is_held and page_size % BLOCK == 0 and not INTERPRETED.value


def programs_of(num_requests: int, num_parts: int, rows: int, processors: int) -> int:
    """Programs that share the partitions of a request, written to memory; 0: one program, which merges them itself.

    The fewest of those with the least partitions one after another; `rows` of a request are written.
    """
    size = num_requests * num_parts * rows * LATENT * 4
    if num_parts == 1 or num_requests >= FULL * processors or size > WRITTEN_BYTES:
        return 0
    most = min(num_parts, max(1, WAVES * processors // num_requests))
    return min(range(1, most + 1), key=lambda n: -(-num_requests * n // processors) * -(-num_parts // n))


def merge(
    maxima: Tensor, sums: Tensor, accs: Tensor, starts: Tensor, lengths: Tensor, out: Tensor, longest: int, part: int,
    rows: int, is_by_token: bool,
) -> None:  # fmt: skip
    """out from the partitions of requests of at most `longest` rows; begins while the kernel before it still runs."""
    (_, num_heads, latent), width, num_parts = out.shape, accs.shape[2], accs.shape[1]
    columns = min(width, COLUMNS)
    loops.merge[(lengths.shape[0], num_heads, width // columns)](
        maxima, sums, accs, starts, lengths, out, num_parts, longest, N=num_heads, L=latent, LW=width, LC=columns,
        BM=rows, PART=part, BY_TOKEN=is_by_token, num_warps=1, launch_pdl=not INTERPRETED.value, **EXACT,
    )  # fmt: skip


def _blocks(rows_RQ: Tensor, columns: int) -> TensorDescriptor:
    """What the copy engine needs to read 64 rows of some columns."""
    block = [ROWS, columns]
    return TensorDescriptor.from_tensor(rows_RQ, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


def attend(
    q_TNQ: Tensor, rows_RQ: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, out: Tensor, lse: Tensor | None,
    scale: float, latent: int, page_size: int, schedule: Schedule, mode: int, bound: int, split: int = 1,
) -> None:  # fmt: skip
    """Run the tile over requests of more than `bound` rows (TILES), or of at most so many (WHOLE, PARTS)."""
    num_tokens, num_heads, width = q_TNQ.shape
    num_requests, part = starts.shape[0] - 1, schedule.kv_partition
    num_tiles = num_tokens * num_heads // ROWS + num_requests
    q_rows = q_TNQ.view(-1, width)
    fp32 = {"dtype": torch.float32, "device": q_TNQ.device}
    grid = (num_requests, split)
    maxima = sums = accs = scratch = out
    num_parts, is_by_token = 1, num_tokens <= num_requests
    if mode == PARTS:
        num_parts = triton.cdiv(table.shape[1] * page_size, part)
        slots = num_tokens * num_heads if is_by_token else num_requests * ROWS
        maxima, sums = (torch.empty(slots, num_parts, **fp32) for _ in range(2))
        accs = torch.empty(slots, num_parts, latent, **fp32)
    else:
        if mode == TILES:
            grid = (min(num_tiles, num_processors(q_TNQ.device.index)),)
        scratch = torch.empty(grid[0], ROWS, latent, **fp32)
    warp_groups.attend[grid](
        _blocks(q_rows, latent // 2), _blocks(q_rows, width - latent), _blocks(rows_RQ, latent // 2),
        _blocks(rows_RQ, width - latent), table, starts, lengths, out, scratch if lse is None else lse, scratch, maxima,
        sums, accs, num_requests, num_tiles, bound, num_parts, table.stride(0), scale * LOG2_E,
        N=num_heads, H=latent // 2, R=width - latent, PART=part, PAGE=page_size, MODE=mode, LSE=lse is not None,
        BY_TOKEN=is_by_token, num_warps=4, **EXACT,
    )  # fmt: skip
    if mode == PARTS:
        merge(maxima, sums, accs, starts, lengths, out, bound, part, ROWS, is_by_token)


def paged(
    q_TNQ: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, scale: float, latent: int,
    out: Tensor, schedule: Schedule, split: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention over pages; `split`: see `programs_of`, for all requests of a decode step, else for short ones."""
    num_tokens, num_heads, width = q_TNQ.shape
    num_requests, page_size = lengths.shape[0], cache.shape[1]
    num_parts = triton.cdiv(table.shape[1] * page_size, schedule.kv_partition)
    is_decode = num_tokens <= num_requests
    if split is None:
        rows = num_heads if is_decode else ROWS
        split = programs_of(num_requests, num_parts, rows, num_processors(cache.device.index))
    given = (q_TNQ, cache.view(-1, width), table, starts, lengths, out, None, scale, latent, page_size, schedule)
    if is_decode:
        attend(*given, PARTS if split else WHOLE, num_tokens * num_heads, max(1, split))
        return out
    if split:
        attend(*given, PARTS, ROWS, split)
    attend(*given, TILES, ROWS if split else 0)
    return out


def packed(
    q_TNQ: Tensor, c_TQ: Tensor, starts: Tensor, out: Tensor, lse: Tensor, scale: float, latent: int,
    schedule: Schedule,
) -> None:  # fmt: skip
    """Attention of packed sequences."""
    attend(q_TNQ, c_TQ, starts, starts, starts, out, lse, scale, latent, 0, schedule, TILES, 0)
