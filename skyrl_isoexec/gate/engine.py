"""An engine without a host: a decoder over pages, whose steps are chosen row by row.

Shapes: T tokens of a step, R requests of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_isoexec.kernels.attention.cases import pages
from skyrl_isoexec.model.decoder import Decoder

Rows = list[tuple[int, int, int]]
"""Of a step: (request, first position, position after the last)."""


class Engine:
    """Requests whose tokens are known, in shuffled pages of one softmax block among memory full of NaN."""

    def __init__(self, decoder: Decoder, sequences: Sequence[Tensor]) -> None:
        config, size = decoder.config, decoder.axis.size
        self.decoder, self.sequences = decoder, sequences
        lengths = tuple(len(s) for s in sequences)
        like = torch.empty(0, config.num_kv_heads // size, config.head_dim, dtype=getattr(torch, config.dtype))
        made, self.device = pages(like, lengths, decoder.schedule.kv_block, decoder.schedule), sequences[0].device
        cache, self.table, slots = (x.to(self.device) for x in made)
        self.caches = {index: cache.clone() for index in decoder.layer_indices}
        self.slots = slots.split(lengths)
        self.rows: list[list[Tensor | None]] = [[None] * length for length in lengths]

    def step(self, rows: Rows) -> None:
        """Compute the given positions of the given requests together, and keep their log-probabilities."""
        kernels, requests = self.decoder.kernels, [r for r, _, _ in rows]
        ids = torch.cat([self.sequences[r][lo:hi] for r, lo, hi in rows])
        positions = torch.cat([torch.arange(lo, hi) for _, lo, hi in rows]).to(self.device)
        slots = torch.cat([self.slots[r][lo:hi] for r, lo, hi in rows])
        starts = torch.tensor([0, *(hi - lo for _, lo, hi in rows)]).cumsum(0).int().to(self.device)
        lengths = torch.tensor([hi for _, _, hi in rows], dtype=torch.int32, device=self.device)
        table = self.table[requests].contiguous()

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kernels.write_kv(k, v, self.caches[index], slots)
            return kernels.attention_paged(q, self.caches[index], table, starts, lengths, self.decoder.config.scale)

        x = self.decoder.layers(self.decoder.embed(ids), positions, attend)
        found = kernels.logprobs(self.decoder.full_logits(x))
        for (r, lo, hi), part in zip(rows, found.split(starts.diff().tolist()), strict=True):
            self.rows[r][lo:hi] = part.unbind(0)

    def logprobs(self) -> Tensor:
        """[T, V] of all requests, in their order; RuntimeError if a position was never computed."""
        missing = [(r, t) for r, rows in enumerate(self.rows) for t, row in enumerate(rows) if row is None]
        if missing:
            raise RuntimeError(f"positions {missing[:5]} were never computed")
        return torch.stack([row for rows in self.rows for row in rows])
