"""The comparison that every step makes: rollout log-probabilities against the trainer's, as bits, counted.

`mismatched_tokens` and `compared_tokens` are over the tokens that train (loss mask above 0). Absolute differences are
SkyRL's own metrics; a step whose comparison is empty or missing has none, and is an error here.
"""

from __future__ import annotations

import torch

from ..schedule.bits import count_mismatches


class ComparisonError(RuntimeError):
    """A step in which nothing, or nothing meaningful, could be compared."""


class Mismatch(RuntimeError):
    """Rollout and trainer disagree in a bit where a contract promises that they do not."""


def compare(rollout: torch.Tensor | None, trainer: torch.Tensor | None, loss_mask: torch.Tensor) -> dict[str, float]:
    """Counts of one step from fp32 log-probabilities [B, R] and a mask of the same shape.

    ComparisonError if either side is missing, no token trains, or a log-probability is NaN, infinite or above 0.
    """
    for side, values in (("rollout", rollout), ("trainer", trainer)):
        if values is None:
            raise ComparisonError(
                f"{side} log-probabilities are missing, so nothing can be compared; "
                "set generator.sampling_params.logprobs=1 and keep the scoring pass on"
            )
        if values.dtype != torch.float32:
            raise ComparisonError(
                f"{side} log-probabilities are {values.dtype}, not float32: the comparison is of bits"
            )
    trains = loss_mask > 0
    if not bool(trains.any()):
        raise ComparisonError("no token of this step trains (the loss mask is 0 everywhere): nothing was compared")
    ours, theirs = trainer[trains], rollout[trains]
    for side, values in (("rollout", theirs), ("trainer", ours)):
        bad = int((~torch.isfinite(values) | (values > 0)).sum())
        if bad:
            raise ComparisonError(f"{bad} of {values.numel()} {side} log-probabilities are NaN, infinite or above 0")
    mismatched, compared = count_mismatches(theirs, ours)
    return {"isoexec/mismatched_tokens": mismatched, "isoexec/compared_tokens": compared}


def refuse_mismatch(counts: dict[str, float]) -> None:
    """Mismatch if any compared token differs: the update that would be made is not the on-policy one."""
    mismatched, compared = counts["isoexec/mismatched_tokens"], counts["isoexec/compared_tokens"]
    if mismatched:
        raise Mismatch(
            f"isoexec/mismatched_tokens is {mismatched} of {compared}, the contract says 0: something outside the "
            "contract changed what one side computes; no update was made with these rollouts. Take away what is not "
            "part of this distribution (hooks, plugins, engine arguments), and report it if nothing is left"
        )
