"""The comparison of a step counts every differing bit, and an empty or meaningless one is an error, never a 0."""

import pytest
import torch

from skyrl_isoexec.launch.exactness import ComparisonError, Mismatch, compare, refuse_mismatch
from skyrl_isoexec.launch.experiment import request_seed

ROLLOUT = torch.tensor([[-0.5, -1.25, 0.0], [-3.0, -0.125, -7.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def test_one_bit_of_one_token_is_counted() -> None:
    trainer = ROLLOUT.clone()
    trainer.view(torch.int32)[1, 1] += 1
    assert compare(ROLLOUT, trainer, MASK) == {"isoexec/mismatched_tokens": 1, "isoexec/compared_tokens": 5}


def test_signed_zeros_differ_and_masked_tokens_do_not_count() -> None:
    trainer = ROLLOUT.clone()
    trainer[0, 2], trainer[1, 2] = -0.0, float("nan")
    assert compare(ROLLOUT, trainer, MASK) == {"isoexec/mismatched_tokens": 1, "isoexec/compared_tokens": 5}


@pytest.mark.parametrize("side", ["rollout", "trainer"])
@pytest.mark.parametrize("bad", [None, "double", float("nan"), float("-inf"), 0.5])
def test_a_meaningless_comparison_is_an_error(side: str, bad: object) -> None:
    values = {"rollout": ROLLOUT.clone(), "trainer": ROLLOUT.clone()}
    if bad is None:
        values[side] = None
    elif bad == "double":
        values[side] = values[side].double()
    else:
        values[side][0, 0] = bad
    with pytest.raises(ComparisonError, match=side):
        compare(values["rollout"], values["trainer"], MASK)


def test_nothing_that_trains_is_an_error() -> None:
    with pytest.raises(ComparisonError, match="nothing was compared"):
        compare(ROLLOUT, ROLLOUT, torch.zeros_like(MASK))


def test_every_trajectory_has_a_seed_of_its_own() -> None:
    places = [(seed, step, name, n) for seed in (1, 2) for step in (1, 11) for name in ("1", "11") for n in range(16)]
    seeds = [request_seed(*place) for place in places]
    assert len(set(seeds)) == len(places) == 128 and seeds == [request_seed(*place) for place in places]


def test_a_mismatch_under_a_contract_ends_the_run() -> None:
    refuse_mismatch({"isoexec/mismatched_tokens": 0, "isoexec/compared_tokens": 9})
    with pytest.raises(Mismatch, match="isoexec/mismatched_tokens is 1 of 9, the contract says 0"):
        refuse_mismatch({"isoexec/mismatched_tokens": 1, "isoexec/compared_tokens": 9})
