"""Which chunks a call of the gated delta rule touches on Hopper, and the launches that every form shares.

Notable: a slot is one chunk of one request in this call, its open one included. Slots are numbered on the device. How
many there are follows from shapes for packed sequences; for pages the device is asked once a step, not once a layer,
because the bound from shapes would hold a chunk for every request, decoding ones too. While a graph is captured nothing
is asked and the bound is taken.

Shapes: T tokens, N slots, C rows of a chunk, K key heads, V value heads, Dk and Dv their widths, R requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.sm90 import EXACT, power_of_two
from skyrl_isoexec.kernels.numeric.sm90_gdn_chunk import prepare, walk
from skyrl_isoexec.kernels.numeric.sm90_gdn_rows import make_rows
from skyrl_isoexec.kernels.numeric.sm90_product import num_processors

WIDTHS = (16, 32, 64, 128)
"""Head widths that tiles hold."""
CHUNKS = (16, 32, 64)
"""Chunks that tiles hold."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The slots of a batch."""

    base: Tensor
    """int32 [R + 1]: the first slot of each request."""
    owner: Tensor
    """int32 [N]: the request of each slot; R for a slot of none."""
    query_start: Tensor
    """int32 [R + 1]."""
    seq_lens: Tensor
    """int32 [R]."""

    @property
    def num(self) -> int:
        """N."""
        return self.owner.shape[0]

    @property
    def num_requests(self) -> int:
        """R."""
        return self.seq_lens.shape[0]


def _remembered(key: Tensor, name: str, depends: tuple[Tensor, ...], make: Callable[[], object]) -> object:
    """What `make` gives, kept on `key` until one of the tensors it depends on is another or was written."""
    if any(x.is_inference() for x in depends):
        return make()  # such tensors do not count their writes
    stamp = tuple((id(x), x._version) for x in depends)
    known = getattr(key, name, None)
    if known is None or known[0] != stamp:
        known = (stamp, make(), [x for x in depends if x is not key])
        setattr(key, name, known)
    return known[1]


def _number(query_start: Tensor, seq_lens: Tensor, chunk: int, num: int | None, shortest: int) -> Slots:
    length = query_start.diff()
    first = (seq_lens - length).div(chunk, rounding_mode="floor")
    span = ((seq_lens + (chunk - 1)).div(chunk, rounding_mode="floor") - first).masked_fill(length < shortest, 0)
    base = torch.nn.functional.pad(span.cumsum(0), (1, 0))
    num = int(base[-1]) if num is None else num
    owner = torch.searchsorted(base, torch.arange(num, device=base.device), right=True) - 1
    return Slots(base=base.int(), owner=owner.int(), query_start=query_start, seq_lens=seq_lens)


def packed_slots(cu_seqlens: Tensor, num_tokens: int, chunk: int) -> Slots:
    """Slots of sequences from their starts; nothing is read back from the device."""

    def make() -> Slots:
        starts = cu_seqlens.to(torch.int32)
        return _number(starts, starts.diff(), chunk, num_tokens // chunk + starts.shape[0] - 1, 1)

    return _remembered(cu_seqlens, f"gdn_slots_{chunk}_{num_tokens}", (cu_seqlens,), make)


def is_captured(x: Tensor) -> bool:
    """Whether the current stream of a tensor's device records a graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def paged_slots(query_start: Tensor, seq_lens: Tensor, num_tokens: int, chunk: int) -> Slots:
    """Slots of the requests with two rows or more: one row is a decode step."""
    bound = num_tokens // chunk + 2 * min(seq_lens.shape[0], num_tokens // 2)
    if is_captured(seq_lens):
        return _number(query_start, seq_lens, chunk, bound, 2)
    return _remembered(
        query_start, f"gdn_slots_{chunk}", (query_start, seq_lens),
        lambda: _number(query_start, seq_lens, chunk, None, 2),
    )  # fmt: skip


def check_shapes(op: str, heads: GdnHeads, chunk: int) -> None:
    """Refuse (ValueError) head widths and chunks that the tiles do not hold."""
    for name, value, known in (
        ("key_width", heads.key_width, WIDTHS),
        ("value_width", heads.value_width, WIDTHS),
        ("schedule.gdn_chunk", chunk, CHUNKS),
    ):
        if value not in known:
            raise ValueError(f"{op}: the sm90 implementation has no {name} {value}; it has {known}")


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Where a batch's states lie."""

    table: Tensor
    """int32 [R, B]."""
    size: int
    """Tokens of a page."""
    states: tuple[Tensor, ...]
    """[P, ...] each."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """Rows of a batch by slot."""

    q_NKCD: Tensor
    k_NKCD: Tensor
    v_NVCD: Tensor
    decay_NVC: Tensor
    """Sums of g from the chunk's start, in powers of two."""
    beta_NVC: Tensor
    steps_NVC: Tensor
    """g of the rows of this step, in powers of two."""


def shape_constants(heads: GdnHeads, chunk: int) -> dict[str, int]:
    """What every kernel is compiled for."""
    return {"C": chunk, "DK": heads.key_width, "DV": heads.value_width, "HK": heads.num_key_heads,
            "HV": heads.num_value_heads}  # fmt: skip


def rows_of(
    rows: tuple[Tensor, ...], slots: Slots, pages: Pages | None, ring: Tensor, keys: Tensor, values: Tensor | None,
    gate: Tensor, heads: GdnHeads, chunk: int, tile: int = 32, warps: int = 4,
) -> Made:  # fmt: skip
    """Queries, keys, values and gates of a batch; `ring`, `keys`, `values` and `gate` are states they go on from.

    Without `values`, rows of v that a page holds are zeros.
    """
    x, a, b, conv, a_log, dt_bias = rows
    key, value, num, device = heads.num_key_heads, heads.num_value_heads, slots.num, x.device
    bf16 = {"dtype": torch.bfloat16, "device": device}
    fp32 = {"dtype": torch.float32, "device": device}
    made = Made(
        q_NKCD=torch.empty(num, key, chunk, heads.key_width, **bf16),
        k_NKCD=torch.empty(num, key, chunk, heads.key_width, **bf16),
        v_NVCD=torch.empty(num, value, chunk, heads.value_width, **bf16),
        decay_NVC=torch.empty(num, value, chunk, **fp32),
        beta_NVC=torch.empty(num, value, chunk, **fp32),
        steps_NVC=torch.empty(num, value, chunk, **fp32),
    )
    held = ring if values is None else values
    tile = min(tile, chunk)
    make_rows[(num * (chunk // tile), 1 + 2 * key + value)](
        x, a, b, conv.t().float().contiguous(), a_log, dt_bias, slots.base, slots.owner, slots.query_start,
        slots.seq_lens,
        pages.table if pages else slots.base, ring, keys, held, gate,
        made.q_NKCD, made.k_NKCD, made.v_NVCD, made.steps_NVC, made.decay_NVC, made.beta_NVC,
        slots.num_requests, pages.table.stride(0) if pages else 0, ring.stride(0), keys.stride(0),
        held.stride(0), gate.stride(0),
        HB=power_of_two(value), W=conv.shape[1], ROWS=tile, PAGED=pages is not None, PAGE=pages.size if pages else 1,
        VALUES=values is not None, num_warps=warps, **shape_constants(heads, chunk), **EXACT,
    )  # fmt: skip
    return made


def system_of(made: Made, slots: Slots, heads: GdnHeads, chunk: int, warps: int = 4) -> tuple[Tensor, Tensor]:
    """(T [N, V, C, C], Z [N, V, C, Dk]) of every slot."""
    num, value = slots.num, heads.num_value_heads
    inverse = made.k_NKCD.new_empty(num, value, chunk, chunk)
    ends = made.k_NKCD.new_empty(num, value, chunk, heads.key_width)
    constants = shape_constants(heads, chunk)
    del constants["DV"]
    prepare[(value, num)](
        made.k_NKCD, made.decay_NVC, made.beta_NVC, slots.owner, inverse, ends, slots.num_requests,
        num_warps=warps, **constants, **EXACT,
    )  # fmt: skip
    return inverse, ends


def columns_of(num_rows: int, width: int, device: int | None) -> int:
    """Columns of a program of the pass, for `num_rows` states: narrow where programs are few. Changes no bit."""
    narrow = min(width, 32)
    return narrow if num_rows * (width // narrow) <= num_processors(device) else min(width, 64)


def states_of(
    made: Made, ends: Tensor, slots: Slots, pages: Pages | None, kept: Tensor | None, snapshot: Tensor, rest: Tensor,
    heads: GdnHeads, chunk: int, choice: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(e [N, V, C, Dv], snapshots [N, V, Dk, Dv]); leaves states in pages. `kept` is the state with e of open chunks.

    `choice` is (columns, warps, stages): changes no bit.
    """
    num, value, width = slots.num, heads.num_value_heads, heads.value_width
    errors = torch.empty_like(made.v_NVCD)
    snapshots = errors.new_empty(num, value, heads.key_width, width)
    device = errors.device.index
    columns, warps, stages = choice or (columns_of(slots.num_requests * value, width, device), 4, 3)
    held = snapshot if kept is None else kept
    walk[(value * (width // columns), slots.num_requests)](
        made.k_NKCD, made.v_NVCD, made.decay_NVC, made.beta_NVC, ends, slots.base, slots.query_start, slots.seq_lens,
        pages.table if pages else slots.base, held, snapshot, rest, errors, snapshots,
        pages.table.stride(0) if pages else 0, held.stride(0), snapshot.stride(0), rest.stride(0),
        BV=columns, PAGED=pages is not None, PAGE=pages.size if pages else 1,
        RESUME=pages is not None and kept is not None, STAGES=stages,
        num_warps=warps, **shape_constants(heads, chunk), **EXACT,
    )  # fmt: skip
    return errors, snapshots
