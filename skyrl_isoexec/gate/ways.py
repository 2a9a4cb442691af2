"""Small models with weights, and every way of computing their log-probabilities.

Shapes: T tokens of all sequences, V vocabulary, H hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from skyrl_isoexec.gate.engine import Engine, Rows
from skyrl_isoexec.gate.models import SIZES, TWINS
from skyrl_isoexec.kernels.bundle import Kernels
from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.model.axes import Axis, SingleAxis
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.model.weights import dtypes, layout, load

Builder = Callable[..., Decoder]
"""make(axis=None, **stage) -> a loaded decoder."""
BOUNDS = (
    *((0, cut, SIZES["num_layers"]) for cut in range(1, SIZES["num_layers"])),
    tuple(range(SIZES["num_layers"] + 1)),
)
"""The layers cut into two stages at every place, and a stage for each layer."""


def random_weights(config: DecoderConfig) -> dict[str, Tensor]:
    """Full tensors, the same bits on every machine. Two experts of a layer have one router's row: their scores tie."""
    kinds, tensors = dtypes(config), {}
    for seed, (name, shape) in enumerate(sorted(layout(config).items())):
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        tensors[name] = (normal(seed, *shape, scale=0.2) + centre).to(kinds[name])
        if ".mlp.gate." in name:
            tensors[name][TWINS[1]] = tensors[name][TWINS[0]]
    return tensors


def builder(config: DecoderConfig, kernels: Kernels, device: str = "cpu") -> Builder:
    """make(axis=None, **stage) -> a loaded decoder on a device."""
    tensors = random_weights(config)

    def make(axis: Axis | None = None, **stage: object) -> Decoder:
        decoder = Decoder(config, kernels, axis or SingleAxis(), kernels.schedule, device=device, **stage)
        load(decoder, tensors)
        return decoder

    return make


def token_ids(config: DecoderConfig, lengths: Sequence[int], device: torch.device | str = "cpu") -> list[Tensor]:
    """Random sequences, the same on every device."""
    random = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(config.vocab_size, (length,), generator=random).to(device) for length in lengths]


def packed(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, positions, cu_seqlens) of sequences laid end to end."""
    cu, ids = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0).int(), torch.cat(list(sequences))
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    return ids, positions.to(ids.device), cu.to(ids.device)


def trainer(decoder: Decoder, sequences: Sequence[Tensor], *, grad: bool) -> Tensor:
    """Log-probabilities [T, V] of packed rows, with or without a graph; the next token's is what a loss computes."""
    ids, positions, cu = packed(sequences)
    next_T1 = ids.roll(-1)[:, None]
    with torch.set_grad_enabled(grad):
        logits = decoder.full_logits(decoder.layers(decoder.embed(ids), positions, decoder.end_to_end(cu)))
        if logits.requires_grad != grad:
            raise RuntimeError(f"a graph was{'' if logits.requires_grad else ' not'} recorded")
        chosen_T = decoder.kernels.token_logprobs(logits, next_T1[:, 0])
        return decoder.kernels.logprobs(logits.detach()).scatter(1, next_T1, chosen_T.detach()[:, None])


@torch.no_grad()
def engine(decoder: Decoder, sequences: Sequence[Tensor], steps: Sequence[Rows]) -> Tensor:
    """Log-probabilities [T, V] of the rows of all steps over pages, in the sequences' order.

    Weights are packed, or where kernels read them as they are, joined.
    """
    if sequences[0].is_cuda:
        decoder.join()
    decoder.refresh_packed()
    run = Engine(decoder, sequences)
    for step in steps:
        run.step(step)
    return run.logprobs()


def prefill_steps(sequences: Sequence[Tensor]) -> list[Rows]:
    """All prompts whole, in one step."""
    return [[(r, 0, len(s)) for r, s in enumerate(sequences)]]


def decode_steps(sequences: Sequence[Tensor]) -> list[Rows]:
    """One token of each live request a step."""
    longest = max(len(s) for s in sequences)
    return [[(r, t, t + 1) for r, s in enumerate(sequences) if t < len(s)] for t in range(longest)]


@torch.no_grad()
def staged(make: Builder, sequences: Sequence[Tensor], bounds: Sequence[int], *axes: Axis, **given: object) -> Tensor:
    """Log-probabilities [T, V] of packed rows that go from stage to stage, each with the layers between two bounds."""
    ids, positions, cu = packed(sequences)
    x = None
    for lo, hi in itertools.pairwise(bounds):
        ends = {"with_embedding": lo == 0, "with_head": hi == bounds[-1]}
        stage = make(*axes, first_layer=lo, last_layer=hi, **ends, **given)
        x = stage.embed(ids) if lo == 0 else x
        x = stage.layers(x, positions, stage.end_to_end(cu))
    return stage.kernels.logprobs(stage.full_logits(x))


def recomputed(decoder: Decoder, sequences: Sequence[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer -> what it gives [T, H] in the forward, and when the backward recomputes it.

    The caller has `set_checkpoint_early_stop(False)`, or a recomputation ends before a layer's last sum.
    """
    ids, positions, cu = packed(sequences)
    outputs: dict[int, list[Tensor]] = {index: [] for index in decoder.layer_indices}

    def layer(index: int, x: Tensor) -> Tensor:
        y = decoder.layer(index, x, positions, decoder.end_to_end(cu))
        outputs[index].append(y.detach())
        return y

    x = decoder.embed(ids)
    for index in decoder.layer_indices:
        x = recompute(layer, index, x, use_reentrant=False)
    with torch.autograd.set_multithreading_enabled(False):  # ranks are threads, and a device has one for all backwards
        decoder.full_logits(x).sum().backward()
    for index, found in outputs.items():
        if len(found) != 2:
            raise RuntimeError(f"layer {index} was computed {len(found)} times, not once more in the backward")
    return {index: tuple(found) for index, found in outputs.items()}
