"""The trainer's model in Megatron's stack: one rank, two tensor, pipeline or data ranks, the same log-probabilities.

Each layout runs once per dtype in its own processes (`ranks.py`); the tests read what the ranks wrote.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skyrl_isoexec.kernels.bundle import load_kernels
from skyrl_isoexec.model import checkpoint, families
from skyrl_isoexec.model.axes import SingleAxis
from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.model.probe import probe
from skyrl_isoexec.schedule.bits import count_mismatches
from skyrl_isoexec.schedule.schedule import Schedule

HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
}
COMPARED = 4 * 11
CASES = [("single", "float32"), ("tp2", "float32"), ("pp2", "float32"), ("dp2", "float32"), ("tp2", "bfloat16")]
CASES += [("single", "bfloat16")]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a tied head."""
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    checkpoint.save(path, HF, checkpoint.random_tensors(families.from_hf(HF, dtype="float32"), seed=5, std=0.3))
    return path


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Each case's results, one entry a rank."""
    found = {}
    for layout, dtype in CASES:
        output, world = tmp_path_factory.mktemp(layout + dtype), 1 if layout == "single" else 2
        shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        shared |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        command = [sys.executable, str(Path(__file__).with_name("ranks.py")), layout, dtype, str(folder), str(output)]
        ranks = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(error[-3000:] for error in errors)
        files = [output / f"rank{rank}.pt" for rank in range(world)]
        found[layout, dtype] = [torch.load(file, weights_only=False) for file in files]
    return found


def decoder(folder: Path, dtype: str) -> Decoder:
    """The decoder alone, of one rank."""
    from ranks import LEAVES

    schedule = Schedule(num_leaves=LEAVES, kv_block=16, kv_partition=32)
    made = Decoder(families.from_hf(HF, dtype=dtype), load_kernels("cpu", schedule), SingleAxis(), schedule)
    checkpoint.load(made, checkpoint.iter_tensors(folder))
    return made


def plain(folder: Path, dtype: str) -> torch.Tensor:
    """The same log-probabilities from the decoder alone, row by row."""
    from ranks import batches

    model = decoder(folder, dtype)
    rows, kernels = [], model.kernels
    for ids in torch.cat(batches()):
        cu = torch.tensor([0, len(ids)], dtype=torch.int32)
        attend = lambda _, q, k, v, cu=cu: kernels.attention(q, k, v, cu, model.config.scale)  # noqa: E731
        with torch.no_grad():
            logits = model.logits(model.layers(model.embed(ids), torch.arange(len(ids)), attend))
        rows.append(kernels.token_logprobs(logits[:-1].contiguous(), ids[1:]))
    return torch.stack(rows)


@pytest.fixture(autouse=True)
def _ranks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_scores_equal_the_plain_decoder(case: tuple[str, str], results: dict, folder: Path) -> None:
    last = results[case][-1]
    assert count_mismatches(last["before"], plain(folder, case[1])) == (0, COMPARED)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_training_forward_equals_scoring(case: tuple[str, str], results: dict, folder: Path) -> None:
    last = results[case][-1]
    assert count_mismatches(last["before"], last["after"])[0] > 0  # the updates moved something
    if case[0] != "dp2":  # there a rank trains on its own half
        assert count_mismatches(last["training"][0], last["before"]) == (0, COMPARED)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_export_is_whole_and_equal_on_every_rank(case: tuple[str, str], results: dict, folder: Path) -> None:
    ranks = results[case]
    assert list(ranks[0]["third"]) == list(ranks[0]["shapes"])
    for name, tensor in ranks[0]["third"].items():
        assert tuple(tensor.shape) == ranks[0]["shapes"][name]
        for other in ranks[1:]:
            assert count_mismatches(tensor, other["third"][name])[0] == 0


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_resumed_step_equals_the_uninterrupted_one(case: tuple[str, str], results: dict, folder: Path) -> None:
    compared = 0
    for rank in results[case]:
        for name, tensor in rank["third"].items():
            mismatched, count = count_mismatches(tensor, rank["resumed"][name])
            assert mismatched == 0, name
            compared += count
    assert compared > 10_000


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_probe_is_the_plain_decoders(case: tuple[str, str], results: dict, folder: Path) -> None:
    wanted = None if case[0] == "pp2" else probe(decoder(folder, case[1]))
    assert [rank["probe"] for rank in results[case]] == [wanted] * len(results[case])
