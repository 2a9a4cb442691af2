"""The trainer's model in Megatron's stack: one rank, two tensor, pipeline or data ranks, the same log-probabilities.

Each case runs once, in processes of its own (`ranks.py`); the tests read what its ranks wrote.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from rank_cases import (
    CASES,
    CHUNK,
    LEAVES,
    LENGTH,
    MODELS,
    RAGGED,
    REPLICATED,
    RESHARDS,
    ROWS,
    batches,
    packed,
    sequences,
)

from skyrl_isoexec.kernels.bundle import load_kernels
from skyrl_isoexec.model import checkpoint, families
from skyrl_isoexec.model.axes import SingleAxis
from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.model.probe import probe
from skyrl_isoexec.schedule.bits import count_mismatches
from skyrl_isoexec.schedule.schedule import Schedule

COMPARED = ROWS * (LENGTH - 1)
Results = Callable[[str], list[dict]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def is_bias(name: str) -> bool:
    """Whether it is the bias of a router, which is not trained."""
    return name.endswith("e_score_correction_bias")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a random checkpoint of each model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, hf in MODELS.items():
        tensors = dict(checkpoint.random_tensors(families.from_hf(hf, dtype="float32"), seed=5, std=0.3))
        for bias in filter(is_bias, tensors):
            tensors[bias] = torch.linspace(-0.2, 0.2, len(tensors[bias])) / 3  # of no bfloat16
        checkpoint.save(folder / name, hf, tensors)
    return folder


@pytest.fixture(scope="module")
def outputs(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what the ranks of every case wrote."""
    folder = tmp_path_factory.mktemp("outputs")
    settings = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run = "import sys, ranks; ranks.main(*sys.argv[1:])"  # no script, which Megatron's own processes would import
    command = [sys.executable, "-c", run, checkpoints, folder, *CASES, *RESHARDS]
    subprocess.run(command, cwd=Path(__file__).parent, env=os.environ | settings, check=True)
    return folder


@pytest.fixture(scope="module")
def results(outputs: Path) -> Results:
    """A case -> what each of its ranks found."""

    @cache
    def read(case: str) -> list[dict]:
        errors = [path.read_text()[-3000:] for path in sorted((outputs / case).glob("error*.txt"))]
        assert not errors, "\n".join(errors)
        files = sorted((outputs / case).glob("rank*.pt"))
        assert files
        return [torch.load(file, weights_only=False) for file in files]

    return read


def decoder(checkpoints: Path, case: str) -> Decoder:
    """The decoder alone, of one rank."""
    model, _, dtype = case.split("-")
    schedule = Schedule(num_leaves=LEAVES, kv_block=16, kv_partition=32, gdn_chunk=CHUNK)
    config = families.from_hf(MODELS[model], dtype=dtype)
    made = Decoder(config, load_kernels("cpu", schedule), SingleAxis(), schedule)
    checkpoint.load(made, checkpoint.iter_tensors(checkpoints / model))
    return made


@torch.no_grad()
def plain(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [T - 1] of a sequence's tokens from the decoder alone."""
    cu = torch.tensor([0, len(ids)], dtype=torch.int32)
    logits = model.logits(model.layers(model.embed(ids), torch.arange(len(ids)), model.end_to_end(cu)))
    return model.kernels.token_logprobs(logits[:-1].contiguous(), ids[1:])


@pytest.mark.parametrize("case", CASES)
def test_scores_equal_the_plain_decoder(case: str, results: Results, checkpoints: Path) -> None:
    model = decoder(checkpoints, case)
    expected = torch.stack([plain(model, ids) for ids in torch.cat(batches())])
    assert count_mismatches(results(case)[-1]["before"], expected) == (0, COMPARED)


@pytest.mark.parametrize("case", CASES)
def test_padding_and_packing_change_no_score(case: str, results: Results, checkpoints: Path) -> None:
    """Rows after a sequence, and sequences before and after it."""
    model, found = decoder(checkpoints, case), results(case)[-1]
    bounds, compared = packed()[1], 0
    for index, ids in enumerate(sequences()):
        expected = plain(model, ids)
        for row in (found["padded"][index], found["packed"][0, bounds[index] :]):
            mismatched, count = count_mismatches(row[: len(expected)], expected)
            assert mismatched == 0
            compared += count
    assert compared == 2 * (sum(RAGGED) - ROWS) and min(RAGGED) < CHUNK < max(RAGGED)


@pytest.mark.parametrize("case", CASES)
def test_padding_changes_no_gradient(case: str, results: Results) -> None:
    """Of the same tokens, whatever follows them; and twice the same bits."""
    for rank in results(case):
        first, other, again = rank["gradients"]
        assert first and any(gradient.any() for gradient in first.values())
        for name, gradient in first.items():
            assert torch.equal(gradient, other[name]), name
            assert count_mismatches(gradient, again[name])[0] == 0, name


def last_stage(ranks: list[dict]) -> list[dict]:
    """What the ranks with log-probabilities found: all, or those of the last stage."""
    return [rank for rank in ranks if rank["before"] is not None]


@pytest.mark.parametrize("case", CASES)
def test_training_forward_equals_scoring(case: str, results: Results, checkpoints: Path) -> None:
    """And the plain decoder, on every rank: with and without recomputation, and in a step on a replica's own part."""
    model, ranks = decoder(checkpoints, case), last_stage(results(case))
    expected = torch.stack([plain(model, ids) for ids in torch.cat(batches())])
    size = 2 if case.split("-")[1] in REPLICATED else 1
    parts = [torch.cat(expected.split(2)[rank["part"]]) for rank in ranks]
    assert {rank["part"].start for rank in ranks} == set(range(size))
    for rank, part in zip(ranks, parts, strict=True):
        for found in (rank["before"], rank["recomputed"][0], rank["kept"][0]):
            assert count_mismatches(found, expected) == (0, COMPARED)
        assert count_mismatches(rank["own"][0], part) == (0, COMPARED // size)
        assert count_mismatches(rank["before"], rank["after"])[0] > 0  # the updates moved something


@pytest.mark.parametrize("case", CASES)
def test_another_order_in_training_is_seen(case: str, results: Results) -> None:
    """Two terms of a linear exchanged in the training forward alone: the comparison above can fail, on every rank."""
    for rank in last_stage(results(case)):
        mismatched, compared = count_mismatches(rank["exchanged"], rank["before"])
        assert mismatched > 0 and compared == COMPARED


@pytest.mark.parametrize("case", CASES)
def test_recomputation_changes_no_gradient(case: str, results: Results) -> None:
    """What is computed again has the bits of what was dropped, so that the gradients have those of what is kept."""
    for rank in results(case):
        again, kept = rank["recomputed"][1], rank["kept"][1]
        assert again.keys() == kept.keys() and any(gradient.any() for gradient in kept.values())
        for name, gradient in kept.items():
            assert count_mismatches(again[name], gradient) == (0, gradient.numel()), name


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_trained(case: str, results: Results, checkpoints: Path) -> None:
    before = dict(checkpoint.iter_export(decoder(checkpoints, case)))
    after = results(case)[0]["third"]
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (count_mismatches(tensor, after[name])[0] > 0) != is_bias(name), name


@pytest.mark.parametrize("case", CASES)
def test_all_but_a_bias_is_sent_in_the_dtype_of_the_engine(case: str, results: Results) -> None:
    for rank in results(case):
        assert rank["sent"] == rank["announced"]
        kept = {name for name, dtype in rank["sent"].items() if dtype != torch.bfloat16}
        assert kept == set(filter(is_bias, rank["third"])) and bool(kept) == case.startswith("latent")
        assert all(rank["third"][name].bfloat16().float().ne(rank["third"][name]).any() for name in kept)


@pytest.mark.parametrize("case", CASES)
def test_export_is_whole_and_equal_on_every_rank(case: str, results: Results) -> None:
    ranks = results(case)
    assert list(ranks[0]["third"]) == list(ranks[0]["shapes"])
    for name, tensor in ranks[0]["third"].items():
        assert tuple(tensor.shape) == ranks[0]["shapes"][name]
        for other in ranks[1:]:
            assert count_mismatches(tensor, other["third"][name])[0] == 0


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_step_equals_the_uninterrupted_one(case: str, results: Results) -> None:
    compared = 0
    for rank in results(case):
        for name, tensor in rank["third"].items():
            mismatched, count = count_mismatches(tensor, rank["resumed"][name])
            assert mismatched == 0, name
            compared += count
    assert compared > 10_000


@pytest.mark.parametrize("case", CASES)
def test_the_probe_is_the_plain_decoders(case: str, results: Results, checkpoints: Path) -> None:
    wanted = None if "-pp2" in case else probe(decoder(checkpoints, case))
    assert [rank["probe"] for rank in results(case)] == [wanted] * len(results(case))


MOE = [case for case in CASES if case.startswith("moe-")]
EXACT_SUMS = "moe-single-float32"
BOUND = {"float32": 2**-16, "bfloat16": 2**-2}
"""Sums in fp32 in other orders; a model in bf16 rounds everywhere and chooses other experts, but half a batch, or a
batch twice, would show."""


@pytest.mark.parametrize("case", MOE)
def test_reduced_gradients_are_those_of_one_rank(case: str, results: Results) -> None:
    """Of the whole batch, of every expert wherever it is; the same bits each time and on every rank of a stage."""
    (expected, _), ranks = results(EXACT_SUMS)[0]["reduced"], results(case)
    bound, compared = BOUND[case.rpartition("-")[2]], set()
    for rank in ranks:
        first, again = rank["reduced"]
        for name, gradient in first.items():
            assert count_mismatches(gradient, again[name])[0] == 0, name
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error <= bound, (name, error)
            twins = [other["reduced"][0][name] for other in ranks if name in other["reduced"][0]]
            assert all(count_mismatches(gradient, twin)[0] == 0 for twin in twins), name
            compared.add(name)
    assert expected.keys() == compared and any(".experts." in name for name in compared)


@pytest.mark.parametrize("case", MOE)
def test_the_norm_of_gradients_is_that_of_one_rank(case: str, results: Results) -> None:
    """Before the first step; it is what clips them, and every rank has the same one."""
    norms = {rank["norms"][0] for rank in results(case)}
    (expected,) = {rank["norms"][0] for rank in results(EXACT_SUMS)}
    assert len(norms) == 1 and expected > 1
    assert abs(norms.pop() / expected - 1) <= BOUND[case.rpartition("-")[2]]


@pytest.mark.parametrize("case", RESHARDS)
def test_other_parallel_sizes_load_the_same_weights(case: str, results: Results) -> None:
    """Saved by two ranks after two steps, loaded by one and by four."""
    saved, *_ = RESHARDS[case]
    expected, _ = results(case)[0][saved]
    for rank in results(case):
        assert tuple(rank) == RESHARDS[case]
        for weights, _ in rank.values():
            assert weights.keys() == expected.keys()
            for name, tensor in weights.items():
                assert count_mismatches(tensor, expected[name])[0] == 0, name


@pytest.mark.parametrize("case", RESHARDS)
def test_other_parallel_sizes_keep_the_optimizer(case: str, results: Results) -> None:
    """What one and four ranks hold after loading, saved again, is all that two ranks saved."""
    first, *others = RESHARDS[case]
    weights, saved = results(case)[0][first]
    whole = {re.sub(r"^chained_\d\.|\.\d$", "", key) for key in saved}
    for state in ("", *(f"optimizer.state.{state}." for state in ("param", "exp_avg", "exp_avg_sq"))):
        assert {f"{state}stage.{name}" for name in weights if not (state and is_bias(name))} <= whole, state
    for sizes in others:
        _, again = results(case)[0][sizes]
        assert again.keys() == saved.keys()
        for key, held in saved.items():
            if key == "optimizer":  # groups and counts of steps
                assert again[key] == held
            else:
                assert count_mismatches(held, again[key])[0] == 0, key


def test_blocks_are_saved_one_by_one(results: Results) -> None:
    """Queries, keys and values of the whole model: not the ranks' parts of them, end to end."""
    weights, saved = results("hybrid-reshard-float32")[0][2, 1]
    cut = [name for name in weights if name.endswith(("in_proj_qkv.weight", "conv1d.weight"))]
    assert len(cut) == 6
    for name in cut:
        assert f"stage.{name}" not in saved
        for i, block in enumerate(weights[name].split((24, 24, 32))):
            assert count_mismatches(saved[f"stage.{name}.{i}"], block) == (0, block.numel())
