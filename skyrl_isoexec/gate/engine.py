"""An engine without a host: a decoder over pages, whose steps are chosen row by row.

Shapes: T tokens of a step, R requests of a step, B pages of a request, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.model.sequences import GdnRows, gdn_heads

Rows = list[tuple[int, int, int]]
"""Of a step: (request, first position, position after the last)."""
States = tuple[Tensor, ...]


@dataclass(kw_only=True)
class Step:
    """The sequences of one step: those of its requests, up to the positions that it computes."""

    decoder: Decoder
    caches: dict[int, Tensor]
    states: dict[int, States]
    table: Tensor
    """int32 [R, B]: pages of keys and values, or of latents."""
    state_table: Tensor
    """int32 [R, B]: pages of recurrent states."""
    slots_T: Tensor
    starts: Tensor
    lengths: Tensor

    def attend(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """o_TND over the pages."""
        kernels, cache = self.decoder.kernels, self.caches[layer]
        kernels.write_kv(k_TKD, v_TKD, cache, self.slots_T)
        return kernels.attention_paged(q_TND, cache, self.table, self.starts, self.lengths, self.decoder.config.scale)

    def attend_latent(self, layer: int, q_TNQ: Tensor, c_TQ: Tensor) -> Tensor:
        """o_TNL over the pages."""
        kernels, config, cache = self.decoder.kernels, self.decoder.config, self.caches[layer]
        kernels.write_latent(c_TQ, cache, self.slots_T)
        batch = (self.table, self.starts, self.lengths)
        return kernels.mla_paged(q_TNQ, cache, *batch, config.scale, config.kv_lora_rank)

    def recur(self, layer: int, rows: GdnRows) -> Tensor:
        """o_TVD over the pages."""
        heads, page = gdn_heads(self.decoder.config, self.decoder.axis.size), self.decoder.schedule.gdn_chunk
        paged = (self.states[layer], self.state_table, self.starts, self.lengths, page, heads)
        return self.decoder.kernels.gdn_paged(*rows.all(), *paged)


class Engine:
    """Requests whose tokens are known, in shuffled pages of one softmax block, or chunk, among memory full of NaN."""

    def __init__(self, decoder: Decoder, sequences: Sequence[Tensor]) -> None:
        config, size = decoder.config, decoder.axis.size
        self.decoder, self.sequences = decoder, sequences
        lengths, page = tuple(len(s) for s in sequences), decoder.schedule.kv_block
        self.device, dtype = sequences[0].device, getattr(torch, config.dtype)
        table = _table(lengths, page)
        num_pages = int(table.max()) + 2
        if config.latent:
            shape = decoder.kernels.mla_cache_shape(num_pages, page, config.latent_width)
        else:
            shape = decoder.kernels.kv_cache_shape(num_pages, page, config.num_kv_heads // size, config.head_dim)
        cache = torch.full(shape, float("nan"), dtype=dtype, device=self.device)
        self.caches = {index: cache.clone() for index in decoder.layer_indices if config.attends(index)}
        self.table, positions = table.to(self.device), map(torch.arange, lengths)
        slots = (own[at // page].long() * page + at % page for own, at in zip(table, positions, strict=True))
        self.slots = [own.to(self.device) for own in slots]
        self.state_table = _table(lengths, decoder.schedule.gdn_chunk).to(self.device)
        self.states = {index: self._states() for index in decoder.layer_indices if not config.attends(index)}
        self.rows: list[list[Tensor | None]] = [[None] * length for length in lengths]

    def _states(self) -> States:
        config, num_pages = self.decoder.config, int(self.state_table.max()) + 2
        heads, dtype = gdn_heads(config, self.decoder.axis.size), getattr(torch, config.dtype)
        shapes = self.decoder.kernels.gdn_states(heads, config.linear_conv_kernel_dim, dtype)
        return tuple(
            torch.full((num_pages, *shape), float("nan"), dtype=kind, device=self.device) for shape, kind in shapes
        )

    def step(self, rows: Rows) -> None:
        """Compute the given positions of the given requests together, and keep their log-probabilities."""
        kernels, requests = self.decoder.kernels, [r for r, _, _ in rows]
        ids = torch.cat([self.sequences[r][lo:hi] for r, lo, hi in rows])
        positions = torch.cat([torch.arange(lo, hi) for _, lo, hi in rows]).to(self.device)
        starts = torch.tensor([0, *(hi - lo for _, lo, hi in rows)]).cumsum(0).int().to(self.device)
        step = Step(
            decoder=self.decoder,
            caches=self.caches,
            states=self.states,
            table=self.table[requests].contiguous(),
            state_table=self.state_table[requests].contiguous(),
            slots_T=torch.cat([self.slots[r][lo:hi] for r, lo, hi in rows]),
            starts=starts,
            lengths=torch.tensor([hi for _, _, hi in rows], dtype=torch.int32, device=self.device),
        )
        x = self.decoder.layers(self.decoder.embed(ids), positions, step)
        found = kernels.logprobs(self.decoder.full_logits(x))
        for (r, lo, hi), part in zip(rows, found.split(starts.diff().tolist()), strict=True):
            self.rows[r][lo:hi] = part.unbind(0)

    def logprobs(self) -> Tensor:
        """[T, V] of all requests, in their order; RuntimeError if a position was never computed."""
        missing = [(r, t) for r, rows in enumerate(self.rows) for t, row in enumerate(rows) if row is None]
        if missing:
            raise RuntimeError(f"positions {missing[:5]} were never computed")
        return torch.stack([row for rows in self.rows for row in rows])


def _table(lengths: Sequence[int], page_size: int) -> Tensor:
    """int32 [R, B]: shuffled pages for each request; page 0 and the last are nobody's."""
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(len(lengths))) + 1
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, own in zip(table, order.split(counts), strict=True):
        row[: len(own)] = own
    return table
