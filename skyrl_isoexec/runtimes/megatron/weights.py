"""Full tensors out of a trainer, under checkpoint names: for weight sync and for saving. Collective over all stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ...model import checkpoint
from .adapter import MegatronDecoder
from .native import NativeModel


def unwrap(module: torch.nn.Module) -> MegatronDecoder | NativeModel:
    """The model under Megatron's wrappers."""
    while not isinstance(module, (MegatronDecoder, NativeModel)):
        module = module.module
    return module


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> full shape of what `export` yields, in its order. No collective."""
    model = unwrap(module)
    if isinstance(model, NativeModel):
        return {name: tuple(tensor.shape) for name, tensor in model.export().items()}
    return checkpoint.layout(model.stage.config)


def dtypes(module: torch.nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.dtype]:
    """Name -> type of what `export` yields with the same dtype: it, but for what is fp32 in a model of any dtype."""
    model = unwrap(module)
    if isinstance(model, NativeModel):
        return {name: tensor.dtype if dtype is None else dtype for name, tensor in model.export().items()}
    config = model.stage.config
    if dtype is not None:
        config = replace(config, dtype=str(dtype).removeprefix("torch."))
    return checkpoint.dtypes(config)


def export(module: torch.nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor) of the whole model on every rank, in the order of `shapes`, cast as `dtypes` says.

    Stages take turns: the owner gathers over its tensor- and expert-parallel axes and broadcasts over the pipeline.
    """
    model = unwrap(module)
    own = dict(checkpoint.iter_export(model.stage)) if isinstance(model, MegatronDecoder) else model.export()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    kept, sent = dtypes(module), dtypes(module, dtype)
    for name, shape in shapes(module).items():
        tensor = own.get(name)
        if stages > 1:
            tensor = _from_owner(tensor, shape, kept[name])
        yield name, tensor.to(sent[name])


def _from_owner(tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    group = parallel_state.get_pipeline_model_parallel_group()
    owners: list[bool | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(owners, tensor is not None, group=group)
    source = owners.index(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.contiguous()
    dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)
    return tensor
