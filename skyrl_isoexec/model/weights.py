"""Tensors into and out of a decoder, under Hugging Face names: strict loading, gathering, random initial values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from skyrl_isoexec.model.axes import SingleAxis
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.decoder import EMBEDDING_NAME, HEAD_NAME, Decoder
from skyrl_isoexec.model.families import lookup
from skyrl_isoexec.model.pieces import Pieces
from skyrl_isoexec.schedule.bits import bit_view
from skyrl_isoexec.schedule.schedule import Schedule

MAX_PROBLEMS = 20


class LoadError(ValueError):
    """Tensors that are not those of the decoder; the message lists each problem with both values."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What `load` did."""

    loaded: tuple[str, ...]
    """Names of the decoder's parameters that were written."""
    elsewhere: tuple[str, ...]
    """Tensors of the model that belong to other pipeline stages."""
    ignored: Mapping[str, str]
    """Tensors left out by a rule of the family, with its reason."""
    rounded: tuple[str, ...]
    """Tensors whose values changed, because the decoder's dtype is narrower than theirs."""


def layout(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name -> full shape of every tensor of a checkpoint of this model, a tied head not repeated."""
    return {name: tuple(p.shape) for name, p in _parameters(config)}


def dtypes(config: DecoderConfig) -> dict[str, torch.dtype]:
    """Name -> dtype, as `layout`: the config's, but for what is fp32 in every model."""
    return {name: p.dtype for name, p in _parameters(config)}


def _parameters(config: DecoderConfig) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return Decoder(config, None, SingleAxis(), Schedule(), device="meta").named_parameters()


@torch.no_grad()
def load(decoder: Decoder, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> LoadReport:
    """Fill every parameter of the decoder from full tensors; each rank keeps its part. No collectives.

    Names are those of the family's checkpoints: its rules say which are left out, which have another name here, and
    which are pieces of one tensor.

    LoadError lists missing, unexpected, repeated and misshapen tensors, and a separate head in a tied checkpoint that
    differs from the embedding; parameters may then be partly written. Derived layouts are the caller's to refresh.
    """
    config, family = decoder.config, lookup(decoder.config.family)
    shapes = layout(config)
    targets = dict(decoder.named_parameters())
    source_of = {name: getattr(p, "tied_to", name) for name, p in targets.items()}
    loaded, elsewhere, ignored, rounded, problems = [], [], {}, [], []
    seen: set[str] = set()
    ends: dict[str, torch.Tensor] = {}  # both ends of a tied model, this rank's part
    pieces = Pieces(family, shapes)

    for given, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        reason, name = family.reason(given, config.num_layers), family.own_name(given)
        if reason is not None:
            ignored[given] = reason
            continue
        added = pieces.add(name, tensor)
        if added is None:
            continue
        name, tensor = added
        if name in seen:
            problems.append(f"{given} was given twice")
            continue
        seen.add(name)
        extra_head = config.tied_head and name == HEAD_NAME
        expected = shapes.get(EMBEDDING_NAME if extra_head else name)
        if expected is None:
            problems.append(f"unexpected {given} of shape {tuple(tensor.shape)}")
            continue
        if tuple(tensor.shape) != expected:
            problems.append(_misshapen(name, tuple(tensor.shape), expected))
            continue
        if config.tied_head and name in (EMBEDDING_NAME, HEAD_NAME):
            ends[name] = _vocabulary_part(decoder, tensor)
        if extra_head:
            continue
        homes = [home for home, source in source_of.items() if source == name]
        for home in homes:
            shard = targets[home].shard
            part = shard.slice(tensor, decoder.axes[shard.axis].rank)
            targets[home].copy_(part)
            if _changed(part, targets[home]):
                rounded.append(home)
        loaded += homes
        if not homes:
            elsewhere.append(name)

    wanted = set(source_of.values()) - pieces.missing().keys()
    problems += pieces.problems + [f"missing {names}" for names in pieces.missing().values()]
    problems += [f"missing {name} of shape {shapes[name]}" for name in sorted(wanted - seen)]
    if len(ends) == 2 and not _same_bits(*ends.values()):
        problems.append(f"{HEAD_NAME} differs from {EMBEDDING_NAME}, but the configuration ties them")
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise LoadError(f"{config.family} checkpoint refused: " + "; ".join(problems[:MAX_PROBLEMS]) + more)
    return LoadReport(loaded=tuple(loaded), elsewhere=tuple(elsewhere), ignored=ignored, rounded=tuple(rounded))


def _misshapen(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    if name in (EMBEDDING_NAME, HEAD_NAME) and len(got) == 2 and got[0] != expected[0]:
        return f"{name} has a vocabulary of {got[0]} rows, the configuration says vocab_size = {expected[0]}"
    return f"{name} has shape {got}, the configuration gives {expected}"


def _changed(given: torch.Tensor, kept: torch.Tensor) -> bool:
    if given.dtype == kept.dtype:
        return False
    back, given = kept.to(given.dtype), given.to(kept.device)
    return bool(((back != given) & ~(back.isnan() & given.isnan())).any())


def _vocabulary_part(decoder: Decoder, full: torch.Tensor) -> torch.Tensor:
    size = full.shape[0] // decoder.axis.size
    return full.narrow(0, decoder.axis.rank * size, size)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bit_view(a), bit_view(b))


@torch.no_grad()
def iter_export(decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, full tensor) of every parameter of this stage, in module order. Collective over its axes.

    A stage's copy of a tied embedding is left out: the stage with the embedding exports it.
    """
    for name, p in decoder.named_parameters():
        if hasattr(p, "tied_to"):
            continue
        whole = p.shard.parts == 1
        axis = decoder.axes[p.shard.axis]
        yield name, p.detach() if whole else p.shard.join(axis.stack_gather(p.detach()).unbind(0))


def export(decoder: Decoder) -> dict[str, torch.Tensor]:
    """All of `iter_export` at once. Collective over its axes."""
    return dict(iter_export(decoder))


def random_tensors(config: DecoderConfig, seed: int, std: float = 0.02) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors of a fresh model, a function of config and seed only: never of the layout that will load them.

    Matrices and convolutions are normal with `std`, vectors as `_start` says; in the decoder's dtypes, on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds = dtypes(config)
    for name, shape in layout(config).items():
        if len(shape) > 1:
            yield name, torch.randn(shape, generator=generator).mul_(std).to(kinds[name])
        else:
            yield name, _start(config, name, shape[0]).to(kinds[name])


def _start(config: DecoderConfig, name: str, size: int) -> torch.Tensor:
    """A fresh vector, fp32: norms multiply by 1, biases add 0; a delta rule's dt_bias is 1, its decays 1 to 16."""
    if name.endswith(".A_log"):
        return torch.linspace(1.0, 16.0, size).log()
    if name.endswith("norm.weight"):
        return torch.full((size,), float(not config.zero_centred_norm or name.endswith("linear_attn.norm.weight")))
    return torch.full((size,), float(name.endswith("dt_bias")))
