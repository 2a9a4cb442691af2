"""A gated delta rule in the place of attention: projections, the rule itself, a gated norm, output projection.

Parameters have the names of Hugging Face's Qwen3_5GatedDeltaNet (transformers 5.8.0). Value heads are cut over the
axis, and the key heads with them.

Shapes: T tokens, H hidden, C channels of queries, keys and values, V value heads of this rank, D their width.
"""

from __future__ import annotations

import torch
from torch import nn

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.layers import ColumnLinear, Place, RMSNorm, RowLinear, parameter
from skyrl_isoexec.model.sequences import GdnRows, Sequences, gdn_heads
from skyrl_isoexec.model.shard import Shard


class GatedDeltaNet(nn.Module):
    """The mixer of layer `index`."""

    def __init__(self, config: DecoderConfig, index: int, place: Place) -> None:
        super().__init__()
        hidden, whole = config.hidden_size, gdn_heads(config, 1)
        values = whole.widths[2]
        mixed = Shard(dim=0, parts=place.axis.size, blocks=whole.widths)
        self.in_proj_qkv = ColumnLinear(hidden, whole.channels, False, place, shard=mixed)
        self.in_proj_z = ColumnLinear(hidden, values, False, place)
        self.in_proj_b = ColumnLinear(hidden, whole.num_value_heads, False, place)
        self.in_proj_a = ColumnLinear(hidden, whole.num_value_heads, False, place)
        self.conv1d = nn.Module()
        self.conv1d.weight = parameter((whole.channels, 1, config.linear_conv_kernel_dim), mixed, place)
        self.A_log = parameter((whole.num_value_heads,), place.cut(0), place)
        self.dt_bias = parameter((whole.num_value_heads,), place.cut(0), place)
        self.norm = RMSNorm(whole.value_width, config.rms_norm_eps, place)
        self.out_proj = RowLinear(values, hidden, False, place)
        self.index, self.place = index, place

    def forward(self, x_TH: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """y_TH, whole on every rank."""
        x_TH = self.place.axis.copy_in(x_TH)
        rows = GdnRows(
            x_TC=self.in_proj_qkv(x_TH),
            a_TV=self.in_proj_a(x_TH),
            b_TV=self.in_proj_b(x_TH),
            conv_CW=self.conv1d.weight.squeeze(1),
            a_log_V=self.A_log,
            dt_bias_V=self.dt_bias,
        )
        z_TF = self.in_proj_z(x_TH)
        o_RD = sequences.recur(self.index, rows).reshape(-1, self.norm.weight.shape[0])
        weight = self.place.axis.copy_in(self.norm.weight)  # each rank normalises other heads: gradients add up
        y_RD = self.place.kernels.gated_rmsnorm(o_RD, z_TF.view_as(o_RD), weight, self.norm.eps)
        return self.out_proj(y_RD.view(z_TF.shape))
