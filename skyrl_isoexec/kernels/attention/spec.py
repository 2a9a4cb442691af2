"""What attention accepts, and the layout of its cache: the checks every implementation runs first.

Shapes: T tokens, N query heads, K key-value heads, D head dimension, S sequences, R requests, P pages of the cache.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import NUM_LANES
from skyrl_isoexec.schedule import Schedule

DTYPES = (torch.float32, torch.bfloat16)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def check_schedule(schedule: Schedule) -> None:
    """Refuse (ValueError) softmax blocks that are not whole groups of the 16 lanes of the denominator."""
    if schedule.kv_block % NUM_LANES:
        raise ValueError(f"attention: schedule.kv_block {schedule.kv_block} is not a multiple of {NUM_LANES}")


def kv_cache_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, *, schedule: Schedule
) -> tuple[int, int, int, int, int]:
    """Shape [P, 2, K, D, page_size] of one layer's cache; refuses (ValueError) a page that is not whole softmax blocks.

    Plane 0 of a page holds keys as [K, D, page_size] (scores vectorise over positions), plane 1 holds values as
    [K, page_size, D] (the accumulator vectorises over the head) in the same number of elements.
    """
    check_schedule(schedule)
    if page_size <= 0 or page_size % schedule.kv_block:
        raise ValueError(f"attention: page size {page_size} is not a multiple of schedule.kv_block {schedule.kv_block}")
    return (num_pages, 2, num_kv_heads, head_dim, page_size)


def planes(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a cache: keys [P, K, D, page_size] and values [P, K, page_size, D]."""
    num_pages, _, num_kv_heads, head_dim, page_size = cache.shape
    return cache[:, 0], cache[:, 1].view(num_pages, num_kv_heads, page_size, head_dim)


def _refuse(what: str) -> None:
    raise ValueError(f"attention: {what}")


def _check_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype or dtype not in DTYPES:
        raise TypeError(f"attention: {name} is {x.dtype} beside {dtype}; all are float32 or all bfloat16")


def check_host(*tensors: Tensor) -> None:
    """Refuse (TypeError) tensors whose memory compiled loops of the host cannot read."""
    for x in tensors:
        if not x.is_cpu:
            raise TypeError(f"attention: the cpu implementation was given a tensor on {x.device}")


def check_rows(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, schedule: Schedule) -> None:
    """Refuse (TypeError, ValueError) shapes, types or sequence bounds that packed attention does not define."""
    check_schedule(schedule)
    for name, x in (("q", q_TND), ("k", k_TKD), ("v", v_TKD)):
        _check_dtype(name, x, q_TND.dtype)
    if k_TKD.shape != v_TKD.shape or q_TND.shape[0] != k_TKD.shape[0] or q_TND.shape[2] != k_TKD.shape[2]:
        _refuse(f"shapes q {tuple(q_TND.shape)}, k {tuple(k_TKD.shape)}, v {tuple(v_TKD.shape)} do not fit")
    if q_TND.shape[1] % k_TKD.shape[1]:
        _refuse(f"{q_TND.shape[1]} query heads are not a multiple of {k_TKD.shape[1]} key-value heads")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != q_TND.shape[0] or bounds != sorted(bounds):
        _refuse(f"cu_seqlens {bounds} does not cut {q_TND.shape[0]} tokens into sequences")


def check_write(k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Refuse (TypeError, ValueError) rows that do not fit the cache; rows past the end of `slots_T` are padding."""
    for name, x in (("k", k_TKD), ("v", v_TKD)):
        _check_dtype(name, x, cache.dtype)
    if slots_T.dtype != torch.int64:
        raise TypeError(f"attention: slots are {slots_T.dtype}, not int64")
    if k_TKD.shape != v_TKD.shape or k_TKD.shape[1:] != cache.shape[2:4] or slots_T.shape[0] > k_TKD.shape[0]:
        _refuse(
            f"shapes k {tuple(k_TKD.shape)}, v {tuple(v_TKD.shape)}, cache {tuple(cache.shape)}, "
            f"slots {tuple(slots_T.shape)} do not fit"
        )
    if not cache.is_contiguous():
        _refuse("the cache is not contiguous")


def check_paged(
    q_TND: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    out: Tensor | None,
    schedule: Schedule,
) -> None:
    """Refuse (TypeError, ValueError) a batch that paged attention does not define.

    Rows past `query_start[-1]` are padding and are not written; entries of `block_table` past a request's last page are
    not read.
    """
    check_schedule(schedule)
    _check_dtype("q", q_TND, cache.dtype)
    for name, x in (("block_table", block_table), ("query_start", query_start), ("seq_lens", seq_lens)):
        if x.dtype != torch.int32:
            raise TypeError(f"attention: {name} is {x.dtype}, not int32")
    num_pages, _, num_kv_heads, head_dim, page_size = cache.shape
    if page_size % schedule.kv_block:
        _refuse(f"page size {page_size} is not a multiple of schedule.kv_block {schedule.kv_block}")
    if q_TND.shape[2] != head_dim or q_TND.shape[1] % num_kv_heads:
        _refuse(f"q {tuple(q_TND.shape)} does not fit cache {tuple(cache.shape)}")
    if not cache.is_contiguous():
        _refuse("the cache is not contiguous")
    if out is not None and (out.shape != q_TND.shape or out.dtype != q_TND.dtype or not out.is_contiguous()):
        _refuse(f"out {tuple(out.shape)} {out.dtype} is not a contiguous tensor like q")
    if query_start.shape[0] != seq_lens.shape[0] + 1 or block_table.shape[0] < seq_lens.shape[0]:
        _refuse("query_start, seq_lens and block_table disagree on the number of requests")
