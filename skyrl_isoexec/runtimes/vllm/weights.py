"""Weights into the engine's decoder, strictly and in place; and the engine end of the gloo transfer.

vLLM loads in two ways: all tensors of a checkpoint at once, or, in an update from a trainer, call by call while its
layerwise reload holds the parameters back and puts them in place when it finishes. Both end in `finish`, which refuses
a set that is not complete: an engine never computes with half an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from skyrl_isoexec.model.decoder import EMBEDDING_NAME, HEAD_NAME, Decoder
from skyrl_isoexec.model.digest import tensor_digest
from skyrl_isoexec.model.families import lookup
from skyrl_isoexec.model.layers import ColumnLinear
from skyrl_isoexec.model.pieces import Pieces
from skyrl_isoexec.model.rope import rope_table
from skyrl_isoexec.model.weights import LoadError, layout
from skyrl_isoexec.runtimes.vllm.transfer import BUCKET_BYTES, GlooGroup, GlooTransfer, announce, receive
from skyrl_isoexec.schedule.bits import bit_view

MAX_NAMES = 20


class WeightLoader:
    """Tensors under the names of a family's checkpoints into one decoder; each rank keeps its part, in place."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.shapes = decoder, layout(decoder.config)
        self.homes: dict[str, list[tuple[torch.nn.Module, str]]] = {name: [] for name in self.shapes}
        self.parameters = dict(decoder.named_parameters())
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for module in decoder.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                self.homes[names[id(parameter)]].append((module, leaf))
                parameter.weight_loader = _make_loader(decoder.axis.rank)
        self.together = {
            f"{prefix}.{leaf}"
            for prefix, module in decoder.named_modules()
            for leaf, _ in module.named_parameters(recurse=False)
            if len(list(module.parameters(recurse=False))) > 1
        }
        """Parameters of modules with several: vLLM puts those in place when all have come."""
        self.family = lookup(decoder.config.family)
        self.received: set[str] = set()
        self.pieces = Pieces(self.family, self.shapes)
        """Matrices of single experts, of a checkpoint; a trainer sends whole tensors."""
        self.complete = False
        self.held_back = False
        self.on_write: Callable[[], None] | None = None
        """Called when tensors come, before any is written, and when all are put in place."""
        self._tied_head: torch.Tensor | None = None

    @torch.no_grad()
    def accept(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take full tensors; LoadError names an unexpected, repeated, misshapen or wrongly typed one.

        When they complete the set, and vLLM does not hold the parameters back, the set is finished here.
        """
        if self.on_write is not None:
            self.on_write()
        if not self.received:
            self.held_back = any(getattr(*home).is_meta for homes in self.homes.values() for home in homes)
        for given, tensor in tensors:
            if self.family.reason(given, self.decoder.config.num_layers) is not None:
                continue
            name = self.family.own_name(given)
            added = self.pieces.add(name, tensor)
            if self.pieces.problems:
                raise LoadError(self.pieces.problems.pop())
            if added is None:
                continue
            name, tensor = added
            if self.decoder.config.tied_head and name == HEAD_NAME:
                self._tied_head = tensor.clone()
                continue
            self._check(name, tensor)
            self.received.add(name)
            if self.held_back and tensor.is_cuda and name in self.together:
                tensor = tensor.clone()  # it waits for the others of its module, the sender's buffer does not
            for module, leaf in self.homes[name]:
                parameter = getattr(module, leaf)
                parameter.weight_loader(parameter, tensor)
        if not self.held_back and len(self.received) == len(self.homes):
            self.finish()

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        expected = self.shapes.get(name)
        if expected is None:
            raise LoadError(f"unexpected tensor {name} of shape {tuple(tensor.shape)}")
        if name in self.received:
            raise LoadError(f"tensor {name} was given twice in one update")
        if tuple(tensor.shape) != expected:
            raise LoadError(f"{name} has shape {tuple(tensor.shape)}, the configuration gives {expected}")
        dtype = self.parameters[name].dtype
        if self.complete and tensor.dtype != dtype:
            raise LoadError(f"{name} was sent as {tensor.dtype}, the engine computes with {dtype}")

    def finish(self) -> None:
        """All tensors are in place: rebuild derived layouts. LoadError names what is missing.

        After a refusal the decoder stays incomplete until a whole set has been loaded. Without any tensor, as after
        vLLM's dummy loading, only the derived layouts are rebuilt.
        """
        if self.on_write is not None:
            self.on_write()
        parts = self.pieces.missing()
        begun = bool(self.received or parts)
        missing = [parts.get(name, name) for name in sorted(self.homes.keys() - self.received)] if begun else []
        received, self.received, self.pieces = begun, set(), Pieces(self.family, self.shapes)
        head, self._tied_head = self._tied_head, None
        if missing:
            self.complete = False
            more = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
            raise LoadError(f"the weights are incomplete; missing: {', '.join(missing[:MAX_NAMES])}{more}")
        if head is not None:
            self._check_tied(head)
        self.decoder.refresh_packed()
        self.complete = self.complete or received

    def _check_tied(self, head: torch.Tensor) -> None:
        embedding = self.parameters[EMBEDDING_NAME]
        part = embedding.shard.slice(head, self.decoder.axis.rank).to(embedding.device, embedding.dtype)
        if not torch.equal(part.view(torch.uint8), embedding.detach().view(torch.uint8)):
            self.complete = False
            raise LoadError(f"{HEAD_NAME} differs from {EMBEDDING_NAME}, but the configuration ties them")

    def places(self) -> dict[str, dict[str, Any]]:
        """For every parameter: which part of the whole tensor this rank holds. Reads no memory."""
        rank = self.decoder.axis.rank
        return {
            name: {
                "dim": p.shard.dim,
                "parts": p.shard.parts,
                "blocks": list(p.shard.blocks),
                "rank": rank if p.shard.dim is not None else 0,
                "shape": list(p.shape),
                "dtype": str(p.dtype).removeprefix("torch."),
            }
            for name, p in self.parameters.items()
        }

    def arrived(self) -> dict[str, dict[str, Any]]:
        """As `places`, with the digest of each part's bytes."""
        return {
            name: {**place, "digest": tensor_digest(self.parameters[name])} for name, place in self.places().items()
        }

    def check(self) -> None:
        """LoadError unless a whole set is in place, and every derived layout is the one of its weight."""
        if not self.complete or self.received:
            raise LoadError(f"the weights are incomplete: {len(self.received)} of {len(self.homes)} tensors have come")
        stale = [name for name, module in self.decoder.named_modules() if not _packed_is_fresh(module)]
        if stale:
            raise LoadError(f"layouts derived from other weights than those in place: {', '.join(stale[:MAX_NAMES])}")
        apart = [name for name, module in self.decoder.named_modules() if not is_joined_whole(module)]
        if apart:
            raise LoadError(
                f"parameters no longer lie in the joined weight that computes them: {', '.join(apart[:MAX_NAMES])}; "
                "whatever changes weights has to write them in place"
            )
        if not torch.equal(bit_view(self.decoder.cos_sin_PR.cpu()), bit_view(expected_table(self.decoder))):
            raise LoadError("the rotary table in memory is not the one that the configuration gives")


def expected_table(decoder: Decoder) -> torch.Tensor:
    """The rotary table that both sides have to hold, on the CPU."""
    with torch.device("cpu"):
        return rope_table(decoder.config)


def _packed_is_fresh(module: torch.nn.Module) -> bool:
    packed = getattr(module, "packed", None)
    if packed is None:
        return True
    return torch.equal(bit_view(module.place.kernels.pack(module.weight.detach())), bit_view(packed))


def is_joined_whole(module: torch.nn.Module) -> bool:
    """Whether every part of a module's joined weight and bias, if it has them, is the memory of a parameter of it."""
    joined = getattr(module, "joined", None)
    if joined is None:
        return True
    linears = [child for child in module.children() if isinstance(child, ColumnLinear)]
    for kind in ("weight", "bias"):
        whole = getattr(joined, kind)
        if whole is None:
            continue
        lie = {(p.data_ptr(), tuple(p.shape)) for p in (getattr(linear, kind) for linear in linears) if p is not None}
        if any((part.data_ptr(), tuple(part.shape)) not in lie for part in whole.split(joined.sizes)):
            return False
    return True


def _make_loader(rank: int) -> Callable[[torch.nn.Parameter, torch.Tensor], None]:
    def load_part(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        # vLLM calls this twice in an update: on a stand-in to count elements, then on the memory that is to be filled.
        param.copy_(param.shard.slice(loaded_weight, rank))

    return load_part


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """As NCCL's: where the trainer waits, the first rank of this engine, and the number of ranks with the trainer."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """As NCCL's: what comes, in order; several tensors share a message if `packed`."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = False
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update_kind != "dense":
            raise ValueError(f"update_kind {self.update_kind!r} is not supported over gloo; only 'dense' is")
        announce(self.names, self.dtype_names, self.shapes)


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """vLLM's weight transfer protocol over gloo, for workers without a GPU."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group; ranks follow vLLM's: data-parallel index first, then the rank inside it."""
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self.group = GlooGroup(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def receive_weights(
        self, update_info: GlooUpdateInfo, load_weights: Callable[[list[tuple[str, torch.Tensor]]], None]
    ) -> None:
        """Receive one update and hand it on bucket by bucket; a refusal is raised when the sender has finished."""
        if self.group is None:
            raise RuntimeError("the weight transfer was not initialised: call init_weight_transfer_engine first")
        announced = announce(update_info.names, update_info.dtype_names, update_info.shapes)
        refusal: Exception | None = None
        for bucket in receive(self.group, announced, update_info.bucket_bytes if update_info.packed else 0):
            try:
                if refusal is None:
                    load_weights(bucket)
            except Exception as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None

    trainer_init = staticmethod(GlooTransfer.trainer_init)
    trainer_send_weights = staticmethod(GlooTransfer.trainer_send_weights)
