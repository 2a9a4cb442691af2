"""Grouped-query attention over a runtime's sequences: projections, head norms, rotation, gate, output projection.

Shapes: T tokens, H hidden, N query heads and K key/value heads of this rank, D head width, R rotated
entries, F = N * D.
"""

from __future__ import annotations

import torch
from torch import nn

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.layers import ColumnLinear, Joined, Place, RMSNorm, RowLinear
from skyrl_isoexec.model.sequences import Sequences


class Attention(nn.Module):
    """Self-attention of layer `index`; heads are cut over the axis."""

    def __init__(self, config: DecoderConfig, index: int, place: Place) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        gated = 2 if config.attention_gate else 1  # a head's gate follows its query
        self.q_proj = ColumnLinear(hidden, config.num_heads * width * gated, config.qkv_bias, place)
        self.k_proj = ColumnLinear(hidden, config.num_kv_heads * width, config.qkv_bias, place)
        self.v_proj = ColumnLinear(hidden, config.num_kv_heads * width, config.qkv_bias, place)
        self.o_proj = RowLinear(config.num_heads * width, hidden, config.o_bias, place)
        offset = 1.0 if config.zero_centred_norm else 0.0
        self.q_norm = RMSNorm(width, config.rms_norm_eps, place, offset=offset) if config.qk_norm else None
        self.k_norm = RMSNorm(width, config.rms_norm_eps, place, offset=offset) if config.qk_norm else None
        self.index, self.head_dim, self.gated, self.place = index, width, config.attention_gate, place
        self.joined: Joined | None = None

    def join(self) -> None:
        """From now on one product computes queries, keys and values, see `Joined`."""
        self.joined = Joined((self.q_proj, self.k_proj, self.v_proj))

    def forward(
        self, x_TH: torch.Tensor, positions_T: torch.Tensor, cos_sin_PR: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """y_TH, whole on every rank."""
        x_TH = self.place.axis.copy_in(x_TH)
        if self.joined is None:
            queries, keys, values = self.q_proj(x_TH), self.k_proj(x_TH), self.v_proj(x_TH)
        else:
            queries, keys, values = self.joined(x_TH)
        if self.gated:
            both = queries.unflatten(1, (-1, 2, self.head_dim))
            queries, gate_TF = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
        q_TND = self._heads(queries, self.q_norm)
        k_TKD, v_TKD = self._heads(keys, self.k_norm), self._heads(values, None)
        q_TND = self.place.kernels.rope(q_TND, positions_T, cos_sin_PR)
        k_TKD = self.place.kernels.rope(k_TKD, positions_T, cos_sin_PR)
        o_TF = sequences.attend(self.index, q_TND, k_TKD, v_TKD).reshape(len(x_TH), q_TND.shape[1] * self.head_dim)
        if self.gated:
            o_TF = self.place.kernels.sigmoid_mul(o_TF, gate_TF)
        return self.o_proj(o_TF)

    def _heads(self, flat: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        heads = flat.unflatten(1, (-1, self.head_dim))
        if norm is None:
            return heads
        weight = self.place.axis.copy_in(norm.weight)  # each rank normalises other heads: gradients add up
        return self.place.kernels.rmsnorm(heads, weight, norm.eps, norm.offset)
