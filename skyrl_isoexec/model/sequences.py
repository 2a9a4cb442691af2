"""Where the earlier rows of each sequence are, which decides how a layer's rows reach them: the one thing that differs
between a trainer and an engine.

Shapes: T tokens, N query heads, K key/value heads, D head width, C channels, V value heads of this rank; L width of
a latent, Q of it with the rotated part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.model.config import DecoderConfig

if TYPE_CHECKING:
    from skyrl_isoexec.kernels.bundle import Kernels


class Sequences(Protocol):
    """The rows of a step, of sequences that started in it or before."""

    def attend(self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        """o_TND of a layer, numbered over the whole model: attention over a sequence's rows so far."""

    def attend_latent(self, layer: int, q_TNQ: torch.Tensor, c_TQ: torch.Tensor) -> torch.Tensor:
        """o_TNL of a layer's latent attention over a sequence's rows so far: c are keys, the first L entries values."""

    def recur(self, layer: int, rows: GdnRows) -> torch.Tensor:
        """o_TVD of a layer's gated delta rule over a sequence's rows so far."""


@dataclass(frozen=True, kw_only=True)
class GdnRows:
    """What a gated delta rule takes of its layer: rows, then parameters; see kernels/gdn."""

    x_TC: torch.Tensor
    """Queries, keys and values before the convolution."""
    a_TV: torch.Tensor
    """Before the gate of the decay."""
    b_TV: torch.Tensor
    """Before the gate of the step's size."""
    conv_CW: torch.Tensor
    a_log_V: torch.Tensor
    dt_bias_V: torch.Tensor

    def all(self) -> tuple[torch.Tensor, ...]:
        """In the order of the kernels' arguments."""
        return self.x_TC, self.a_TV, self.b_TV, self.conv_CW, self.a_log_V, self.dt_bias_V


def gdn_heads(config: DecoderConfig, size: int) -> GdnHeads | None:
    """Heads of one of `size` tensor-parallel ranks; None for a model without a gated delta rule."""
    if not config.hybrid:
        return None
    return GdnHeads(
        num_key_heads=config.linear_num_key_heads // size,
        num_value_heads=config.linear_num_value_heads // size,
        key_width=config.linear_key_head_dim,
        value_width=config.linear_value_head_dim,
    )


class Packed:
    """Whole sequences laid end to end, with or without a graph: a trainer's."""

    def __init__(self, kernels: Kernels, config: DecoderConfig, size: int, cu_seqlens: torch.Tensor) -> None:
        """`size` is that of the tensor-parallel axis; `cu_seqlens` int32, from 0 to T."""
        self.kernels, self.cu_seqlens, self.scale = kernels, cu_seqlens, config.scale
        self.latent, self.heads = config.kv_lora_rank, gdn_heads(config, size)

    def attend(self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        """o_TND."""
        return self.kernels.attention(q_TND, k_TKD, v_TKD, self.cu_seqlens, self.scale)

    def attend_latent(self, layer: int, q_TNQ: torch.Tensor, c_TQ: torch.Tensor) -> torch.Tensor:
        """o_TNL."""
        return self.kernels.mla(q_TNQ, c_TQ, self.cu_seqlens, self.scale, self.latent)

    def recur(self, layer: int, rows: GdnRows) -> torch.Tensor:
        """o_TVD."""
        return self.kernels.gdn(*rows.all(), self.cu_seqlens, self.heads)
