"""`isoexec bench trainer`: both arms do one work, and there is no time without a device."""

import argparse

import pytest
import torch

from skyrl_isoexec.bench import trainer
from skyrl_isoexec.bench.commands import add_parser

pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("name", trainer.MODELS)
def test_both_arms_compute_one_loss(name: str) -> None:
    """Of the same tokens, but for fp32 rounding; and on other tokens it is another one."""
    changes = SMALL | ({"head_dim": 8} if name.startswith("Qwen3") else {})
    ours, native = trainer.pair(name, "cpu", "float32", "cpu", (2, 12), changes)
    a, b = ours(), native()
    assert torch.isfinite(a) and abs(a - b) < 1e-5 * b
    assert a == ours()
    others, _ = trainer.pair(name, "cpu", "float32", "cpu", (2, 11), changes)
    assert abs(others() - a) > 1e-5 * a


def test_operations() -> None:
    """Of one token of a model of one layer, by hand."""
    _, _, config = trainer.described("SmolLM2-135M", "float32", SMALL | {"num_hidden_layers": 1})
    size = 64 * 32 + 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 3 * 32
    assert trainer.operations(config, (1, 1)) == 6 * size + 12 * 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_it_refuses_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    for more, said in ([], "no CUDA device"), (["--models", "third"], "unknown ['third']"):
        arguments = parser.parse_args(["bench", "trainer", *more])
        assert arguments.run(arguments) == 2 and said in capsys.readouterr().err
