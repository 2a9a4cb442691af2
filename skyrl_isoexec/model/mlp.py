"""SwiGLU MLP: down(silu(gate(x)) * up(x)), the inner width cut over the axis."""

from __future__ import annotations

import torch
from torch import nn

from skyrl_isoexec.model.layers import ColumnLinear, Joined, Place, RowLinear


class MLP(nn.Module):
    """Three projections without bias."""

    def __init__(self, hidden: int, width: int, place: Place) -> None:
        super().__init__()
        self.gate_proj = ColumnLinear(hidden, width, False, place)
        self.up_proj = ColumnLinear(hidden, width, False, place)
        self.down_proj = RowLinear(width, hidden, False, place)
        self.place, self.joined = place, None

    def join(self) -> None:
        """From now on one product computes gate and up, see `Joined`."""
        self.joined = Joined((self.gate_proj, self.up_proj))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """y_TH, whole on every rank."""
        x_TH = self.place.axis.copy_in(x_TH)
        gate_TF, up_TF = (self.gate_proj(x_TH), self.up_proj(x_TH)) if self.joined is None else self.joined(x_TH)
        return self.down_proj(self.place.kernels.silu_mul(gate_TF, up_TF))
