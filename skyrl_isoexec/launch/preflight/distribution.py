"""The distribution that is sampled from, which has to be the one that is trained, in either arm."""

from __future__ import annotations

import math
from typing import Any

from .refusal import Refusal

EXACT = 0.5
"""Significand of a power of two."""
PARAMS = "generator.sampling_params"
HARMLESS = ("ignore_eos", "spaces_between_special_tokens", "stop_token_ids")
"""Further arguments of vLLM's sampling that leave every token's probability alone."""


def sampling(cfg: Any) -> None:
    """Refuse sampling settings under which rollout and trainer log-probabilities do not mean the same."""
    params = cfg.generator.sampling_params
    if params.logprobs not in (0, 1):
        value = "null" if params.logprobs is None else params.logprobs
        raise Refusal(f"{PARAMS}.logprobs={value}: rollouts would carry nothing to compare; set it to 1")
    for name, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        value = getattr(params, name)
        if value != neutral and not (name == "top_k" and value == 0):
            raise Refusal(
                f"{PARAMS}.{name}={value} changes the distribution that is sampled from, and the trainer scores the "
                f"whole one; set it to {neutral}"
            )
    if params.stop is not None:
        raise Refusal(
            f"{PARAMS}.stop={list(params.stop)} makes SkyRL append an end token that was never "
            "sampled, with a made-up log-probability; set it to null and let the model end by its end token"
        )
    for name in params.additional_kwargs or {}:
        if name not in HARMLESS:
            raise Refusal(
                f"{PARAMS}.additional_kwargs.{name} might change the distribution that is sampled from, and the "
                f"trainer scores the whole one; leave it out (allowed are {', '.join(HARMLESS)})"
            )
    trained = cfg.trainer.algorithm.temperature
    if trained is not None and trained != params.temperature:
        raise Refusal(
            f"trainer.algorithm.temperature={trained} differs from {PARAMS}.temperature="
            f"{params.temperature}; set one of them, they must be equal"
        )


def division(temperature: float) -> None:
    """Refuse a temperature whose division does not have one result on a GPU.

    There, torch divides by a number, as the trainer does, with its rounded reciprocal, and by a tensor, as the engine
    does, exactly; the two agree for powers of two.
    """
    if math.frexp(temperature)[0] != EXACT:
        raise Refusal(
            f"{PARAMS}.temperature={temperature} with runtime.device=cuda: trainer and engine divide by it with "
            "different roundings there; set it to a power of two, such as 1.0 or 0.5"
        )
