"""One short forward of a live decoder, as a digest: finds what no fact names, such as a hook or a replaced method.

Two processes that hold the same weights under the same contract give the same digest, whatever their degrees. Only what
the decoder itself computes is in it: not a runtime's paging, scheduling or sampling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from skyrl_isoexec.model.sequences import Sequences

if TYPE_CHECKING:
    from skyrl_isoexec.model.decoder import Decoder

LENGTHS = (70, 7)
"""Tokens of the two packed sequences; the first is longer than a softmax block of 16, and than a chunk of 64."""
FACTOR, SHIFT = 7919, 13
"""Token i is (FACTOR * i + SHIFT) modulo the size of the vocabulary."""


def probe(decoder: Decoder) -> str | None:
    """SHA-256 over the rotary table and the fp32 log-probabilities of fixed tokens; None for a part of a pipeline.

    Collective over the decoder's axes. Layers are run twice, as both runtimes call them. Leaves no trace: no
    gradient, no cache, nothing counted. RuntimeError where the weights are not in the memory that computes.
    """
    if not _whole(decoder):
        return None
    _check_at_hand(decoder)
    kernels, found = decoder.kernels, hashlib.sha256()
    case = kernels.case
    kernels.case = None
    try:
        with torch.no_grad():
            for part in (decoder.cos_sin_PR, *_logprobs(decoder)):
                found.update(part.detach().cpu().contiguous().view(torch.uint8).numpy())
    finally:
        kernels.case = case
    return found.hexdigest()


def _logprobs(decoder: Decoder) -> Iterable[torch.Tensor]:
    """fp32 [sum of LENGTHS, vocabulary], by `Decoder.layers` and by each `Decoder.layer`."""
    device = decoder.cos_sin_PR.device
    ids_T = (torch.arange(sum(LENGTHS), device=device) * FACTOR + SHIFT) % decoder.config.vocab_size
    longest = decoder.cos_sin_PR.shape[0]
    positions_T = torch.cat([torch.arange(length, device=device) % longest for length in LENGTHS])
    bounds = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32, device=device)
    packed = decoder.end_to_end(bounds)

    def one_by_one(x_TH: torch.Tensor, positions_T: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        for index in decoder.layer_indices:
            x_TH = decoder.layer(index, x_TH, positions_T, sequences)
        return x_TH

    ways: tuple[Callable[..., torch.Tensor], ...] = (decoder.layers, one_by_one)
    for layers in ways:
        yield decoder.kernels.logprobs(decoder.full_logits(layers(decoder.embed(ids_T), positions_T, packed)))


def _whole(decoder: Decoder) -> bool:
    """Whether this stage is the whole model."""
    every = range(decoder.config.num_layers)
    return decoder.layer_indices == every and hasattr(decoder.model, "embed_tokens") and hasattr(decoder, "lm_head")


def _check_at_hand(decoder: Decoder) -> None:
    device = decoder.cos_sin_PR.device
    for name, parameter in decoder.named_parameters():
        if parameter.device != device or (parameter.numel() and not parameter.untyped_storage().nbytes()):
            raise RuntimeError(
                f"{name} is on {parameter.device} or without memory, the model computes on {device}; bring the weights "
                "back before the probe"
            )
