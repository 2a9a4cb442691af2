"""Leaf modules: normalisation, the two parallel linears, the sharded embedding.

Shapes: T tokens, H hidden, K input and N output features of the local part, V local vocabulary. Parameters are created
full of NaN, so that a tensor nobody loaded shows. `packed` holds a layout derived from the weight by `refresh_packed`,
for an engine; it must be refreshed after every change of the weight, and a trainer never makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from skyrl_isoexec.model.axes import Axis
from skyrl_isoexec.model.shard import Shard

if TYPE_CHECKING:
    from skyrl_isoexec.kernels.bundle import Kernels

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Place:
    """What every module of one decoder shares: kernels, axes, number of leaves, dtype and device."""

    def __init__(
        self,
        kernels: Kernels,
        axis: Axis,
        num_leaves: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        expert_axis: Axis | None = None,
    ) -> None:
        self.kernels, self.axis, self.num_leaves, self.dtype, self.device = kernels, axis, num_leaves, dtype, device
        self.expert_axis = expert_axis

    def cut(self, dim: int) -> Shard:
        """Shard of a dim over the whole axis."""
        return Shard(dim=dim, parts=self.axis.size)

    def cut_experts(self) -> Shard:
        """Shard of a dim 0 of experts: over their own axis, or over that of the tensors where they have none."""
        return self.cut(0) if self.expert_axis is None else Shard(dim=0, parts=self.expert_axis.size, axis="ep")


def parameter(
    full: tuple[int, ...], shard: Shard, like: Place, *, dtype: torch.dtype | None = None, trained: bool = True
) -> nn.Parameter:
    """This rank's part of a parameter of shape `full`, filled with NaN and carrying its `shard`.

    `dtype` is the place's by default. One that is not `trained` gets no gradient.
    """
    data = torch.full(shard.local_shape(full), float("nan"), dtype=dtype or like.dtype, device=like.device)
    made = nn.Parameter(data, requires_grad=trained)
    made.shard = shard
    return made


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dim; the weight is whole on every rank."""

    def __init__(self, width: int, eps: float, place: Place, *, offset: float = 0.0) -> None:
        """`offset` is added to the weight, in fp32: 1.0 where a model keeps it as the difference from 1."""
        super().__init__()
        self.weight = parameter((width,), Shard(), place)
        self.eps, self.offset, self.place = eps, offset, place

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Normalised x, same shape and dtype."""
        return self.place.kernels.rmsnorm(x_TH, self.weight, self.eps, self.offset)

    def add(self, x_TH: torch.Tensor, residual_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(residual + x), residual + x), the sum rounded to dtype before it is normalised."""
        return self.place.kernels.add_rmsnorm(x_TH, residual_TH, self.weight, self.eps, self.offset)


class ColumnLinear(nn.Module):
    """Linear whose outputs are cut over the axis. Its caller passes x through `axis.copy_in` first.

    With a `shard` that cuts nothing, every rank has it whole, and takes x as it is.
    """

    def __init__(self, num_in: int, num_out: int, bias: bool, place: Place, *, shard: Shard | None = None) -> None:
        super().__init__()
        shard = place.cut(0) if shard is None else shard
        self.weight = parameter((num_out, num_in), shard, place)
        self.bias = parameter((num_out,), shard, place) if bias else None
        self.place, self.packed = place, None

    def forward(self, x_TK: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """y_TN for this rank's N, rounded once to out_dtype (x.dtype by default), then the bias."""
        return self.place.kernels.linear(x_TK, self.weight, self.bias, out_dtype, self.packed)

    def refresh_packed(self) -> None:
        """Rebuild `packed` from the weight, at the same address if it exists."""
        self.packed = self.place.kernels.pack(self.weight.detach(), self.packed)


class Joined:
    """Linears of one input whose weights lie end to end, so that one product computes all of them, with equal bits.

    Their parameters become parts of one piece of memory: whoever loads one loads this. For an engine, since no
    gradient finds its way back; results are parts of rows, which kernels read where they are.
    """

    def __init__(self, linears: Sequence[ColumnLinear]) -> None:
        self.place, self.sizes = linears[0].place, [len(linear.weight) for linear in linears]
        self.weight = _end_to_end([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if biases and len(biases) != len(linears):
            raise ValueError(f"{len(biases)} of {len(linears)} linears have a bias; all do or none does")
        self.bias = _end_to_end(biases) if biases else None

    def __call__(self, x_TK: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """y_TN of each linear."""
        return self.place.kernels.linear(x_TK, self.weight, self.bias, None, None).split(self.sizes, 1)


def _end_to_end(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """One tensor of which the parameters are the parts, in the place of their own memory."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


class RowLinear(nn.Module):
    """Linear whose inputs are cut over the axis: fp32 leaves, one fixed tree, one rounding, then the bias."""

    def __init__(self, num_in: int, num_out: int, bias: bool, place: Place) -> None:
        super().__init__()
        self.weight = parameter((num_out, num_in), place.cut(1), place)
        self.bias = parameter((num_out,), Shard(), place) if bias else None
        self.place, self.packed = place, None
        self.local_leaves = place.num_leaves // place.axis.size

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        """y_TN whole on every rank, in x.dtype."""
        kernels, axis, dtype = self.place.kernels, self.place.axis, x_TK.dtype
        if axis.size == 1:
            y_TN = kernels.row_linear(x_TK, self.weight, self.local_leaves, self.packed, dtype)
        else:
            node_TN = kernels.row_linear(x_TK, self.weight, self.local_leaves, self.packed)  # of this rank's subtree
            y_TN = kernels.tree_sum(axis.stack_gather(node_TN)).to(dtype)
        return y_TN if self.bias is None else y_TN + self.bias

    refresh_packed = ColumnLinear.refresh_packed


class VocabEmbedding(nn.Module):
    """Embedding cut over the vocabulary. Each row is taken from its owner: no masked sum, so -0 stays -0."""

    def __init__(self, num_rows: int, width: int, place: Place) -> None:
        super().__init__()
        self.weight = parameter((num_rows, width), place.cut(0), place)
        self.place = place

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """x_TH, whole on every rank."""
        kernels, axis = self.place.kernels, self.place.axis
        if axis.size == 1:
            return kernels.embedding(ids_T, self.weight)
        rows = self.weight.shape[0]
        owner_T = torch.div(ids_T, rows, rounding_mode="floor")
        mine = owner_T == axis.rank
        local_T = torch.where(mine, ids_T - axis.rank * rows, 0)
        parts = axis.stack_gather(kernels.embedding(local_T, self.weight))  # [size, T, H]
        return parts[owner_T, torch.arange(ids_T.shape[0], device=ids_T.device)]
