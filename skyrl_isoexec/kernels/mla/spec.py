"""What latent attention accepts, and the layout of its cache: the checks every implementation runs first.

Shapes: T tokens, N query heads of a rank, L latent rank, Q = L + width of the rotated part, K and M input and output
features of a head, C context, R requests, P pages of the cache.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import NUM_LANES
from skyrl_isoexec.schedule import Schedule

DTYPES = (torch.float32, torch.bfloat16)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def _refuse(what: str) -> None:
    raise ValueError(f"mla: {what}")


def _check_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype or dtype not in DTYPES:
        raise TypeError(f"mla: {name} is {x.dtype} beside {dtype}; all are float32 or all bfloat16")


def check_schedule(schedule: Schedule) -> None:
    """Refuse (ValueError) softmax blocks that are not whole groups of the 16 lanes of the denominator."""
    if schedule.kv_block % NUM_LANES:
        _refuse(f"schedule.kv_block {schedule.kv_block} is not a multiple of {NUM_LANES}")


def check_host(*tensors: Tensor) -> None:
    """Refuse (TypeError) tensors whose memory compiled loops of the host cannot read."""
    for x in tensors:
        if not x.is_cpu:
            raise TypeError(f"mla: the cpu implementation was given a tensor on {x.device}")


def mla_cache_shape(num_pages: int, page_size: int, width: int) -> tuple[int, int, int]:
    """Shape [P, page_size, Q] of one layer's cache: a position's latent and rotated part lie together, for all heads.

    ValueError for sizes that are not positive. That a page is whole softmax blocks is checked where it is read.
    """
    if min(num_pages, page_size, width) < 1:
        _refuse(f"a cache of {num_pages} pages of {page_size} positions of width {width} has a size below 1")
    return num_pages, page_size, width


def check_heads(x_TNK: Tensor, w_NMK: Tensor) -> None:
    """Refuse (TypeError, ValueError) operands of a linear per head that do not fit; strides are free."""
    x, w = x_TNK.shape, w_NMK.shape
    if len(x) != 3 or len(w) != 3 or x[1] != w[0] or x[2] != w[2] or not w[0]:
        _refuse(f"x {tuple(x)} and w {tuple(w)} are not [T, N, K] and [N, M, K] with one or more heads")
    _check_dtype("w", w_NMK, x_TNK.dtype)


def check_latent(latent: int, width: int) -> None:
    """Refuse (ValueError) a latent that is not a proper part of a key."""
    if not 0 < latent < width:
        _refuse(f"latent {latent} is not between 1 and {width - 1}, for keys of width {width} with a rotated part")


def check_rows(q_TNQ: Tensor, c_TQ: Tensor, cu_seqlens: Tensor, latent: int, schedule: Schedule) -> None:
    """Refuse (TypeError, ValueError) shapes, types or sequence bounds that packed latent attention does not define."""
    check_schedule(schedule)
    for name, x in (("q", q_TNQ), ("c", c_TQ)):
        _check_dtype(name, x, q_TNQ.dtype)
    q, c = q_TNQ.shape, c_TQ.shape
    if len(q) != 3 or len(c) != 2 or (q[0], q[2]) != tuple(c) or not q[1]:
        _refuse(f"q {tuple(q)} and c {tuple(c)} are not [T, N, Q] and [T, Q] with one or more heads")
    check_latent(latent, c[1])
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != q[0] or bounds != sorted(bounds):
        _refuse(f"cu_seqlens {bounds} does not cut {q[0]} tokens into sequences")


def check_cache(cache: Tensor) -> None:
    """Refuse (ValueError) a cache that is not one piece of [P, page_size, Q]."""
    if cache.dim() != 3 or not cache.is_contiguous():
        _refuse(f"the cache {tuple(cache.shape)} is not a contiguous [P, page_size, Q]")


def check_write(c_TQ: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Refuse (TypeError, ValueError) rows that do not fit the cache; rows past the end of `slots_T` are padding."""
    _check_dtype("c", c_TQ, cache.dtype)
    check_cache(cache)
    if slots_T.dtype != torch.int64:
        raise TypeError(f"mla: slots are {slots_T.dtype}, not int64")
    if c_TQ.dim() != 2 or c_TQ.shape[1] != cache.shape[2] or slots_T.shape[0] > c_TQ.shape[0]:
        _refuse(f"c {tuple(c_TQ.shape)}, cache {tuple(cache.shape)}, slots {tuple(slots_T.shape)} do not fit")


def check_paged(
    q_TNQ: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    latent: int,
    out: Tensor | None,
    schedule: Schedule,
) -> None:
    """Refuse (TypeError, ValueError) a batch that paged latent attention does not define.

    Rows past `query_start[-1]` are padding and are not written; entries of `block_table` past a request's last page are
    not read.
    """
    check_schedule(schedule)
    _check_dtype("q", q_TNQ, cache.dtype)
    for name, x in (("block_table", block_table), ("query_start", query_start), ("seq_lens", seq_lens)):
        if x.dtype != torch.int32:
            raise TypeError(f"mla: {name} is {x.dtype}, not int32")
        if x.dim() != 1 + (name == "block_table") or x.stride(-1) != 1:
            _refuse(f"{name} {tuple(x.shape)} with strides {x.stride()} does not lie in rows of int32")
    check_cache(cache)
    _num_pages, page_size, width = cache.shape
    if page_size % schedule.kv_block:
        _refuse(f"page size {page_size} is not a multiple of schedule.kv_block {schedule.kv_block}")
    if q_TNQ.dim() != 3 or q_TNQ.shape[2] != width or not q_TNQ.shape[1]:
        _refuse(f"q {tuple(q_TNQ.shape)} does not fit cache {tuple(cache.shape)}")
    check_latent(latent, width)
    if out is not None:
        shape = (*q_TNQ.shape[:2], latent)
        if tuple(out.shape) != shape or out.dtype != q_TNQ.dtype or not out.is_contiguous():
            _refuse(f"out {tuple(out.shape)} {out.dtype} is not a contiguous {shape} {q_TNQ.dtype}")
    if query_start.shape[0] != seq_lens.shape[0] + 1 or block_table.shape[0] < seq_lens.shape[0]:
        _refuse("query_start, seq_lens and block_table disagree on the number of requests")
