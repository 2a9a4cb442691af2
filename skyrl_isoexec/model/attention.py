"""Grouped-query attention around a runtime's `attend`: projections, head norms, rotation, output projection.

Shapes: T tokens, H hidden, N query heads and K key/value heads of this rank, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.layers import ColumnLinear, Place, RMSNorm, RowLinear

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer index, q_TND, k_TKD, v_TKD) -> o_TND: packed rows in a trainer, pages in an engine."""


class Attention(nn.Module):
    """Self-attention of layer `index`; heads are cut over the axis."""

    def __init__(self, config: DecoderConfig, index: int, place: Place) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        self.q_proj = ColumnLinear(hidden, config.num_heads * width, config.qkv_bias, place)
        self.k_proj = ColumnLinear(hidden, config.num_kv_heads * width, config.qkv_bias, place)
        self.v_proj = ColumnLinear(hidden, config.num_kv_heads * width, config.qkv_bias, place)
        self.o_proj = RowLinear(config.num_heads * width, hidden, config.o_bias, place)
        self.q_norm = RMSNorm(width, config.rms_norm_eps, place) if config.qk_norm else None
        self.k_norm = RMSNorm(width, config.rms_norm_eps, place) if config.qk_norm else None
        self.index, self.head_dim, self.place = index, width, place

    def forward(
        self, x_TH: torch.Tensor, positions_T: torch.Tensor, cos_sin_PD: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """y_TH, whole on every rank."""
        x_TH = self.place.axis.copy_in(x_TH)
        q_TND = self._heads(self.q_proj(x_TH), self.q_norm)
        k_TKD = self._heads(self.k_proj(x_TH), self.k_norm)
        v_TKD = self._heads(self.v_proj(x_TH), None)
        q_TND = self.place.kernels.rope(q_TND, positions_T, cos_sin_PD)
        k_TKD = self.place.kernels.rope(k_TKD, positions_T, cos_sin_PD)
        o_TND = attend(self.index, q_TND, k_TKD, v_TKD)
        return self.o_proj(o_TND.reshape(o_TND.shape[0], q_TND.shape[1] * self.head_dim))

    def _heads(self, flat: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        num_rows, num_heads = flat.shape[0], flat.shape[1] // self.head_dim
        if norm is not None:
            rows = flat.view(num_rows * num_heads, self.head_dim)
            weight = self.place.axis.copy_in(norm.weight)  # each rank normalises other heads: gradients add up
            flat = self.place.kernels.rmsnorm(rows, weight, norm.eps)
        return flat.view(num_rows, num_heads, self.head_dim)
