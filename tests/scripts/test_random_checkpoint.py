"""A random checkpoint of published widths is one that both transformers and this package read."""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_isoexec.model.checkpoint import iter_tensors, read_config
from skyrl_isoexec.model.families import from_hf

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "random_checkpoint.py"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


LATENT = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=240)


def test_a_small_hybrid(tmp_path: Path) -> None:
    out = tmp_path / "model"
    changes = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    done = run("Qwen3_5TextConfig", "--layers", "4", "--out", str(out), *changes)
    assert done.returncode == 0, done.stderr
    config = from_hf(read_config(out))
    assert (config.num_layers, config.full_attention_interval, config.dtype) == (4, 4, "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.bfloat16)
    stored = dict(iter_tensors(out))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    assert len(AutoTokenizer.from_pretrained(str(out))) == 16


def test_latent_attention(tmp_path: Path) -> None:
    out = tmp_path / "model"
    changes = [part for key, value in LATENT.items() for part in ("--set", f"{key}={value}")]
    done = run("Glm4MoeLiteConfig", "--layers", "2", "--out", str(out), *changes)
    assert done.returncode == 0, done.stderr
    config = from_hf(read_config(out))
    assert (config.first_dense_layers, config.kv_lora_rank, config.router_bias) == (1, 512, True)
    model = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.bfloat16)
    stored = dict(iter_tensors(out))
    assert stored.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[name]) and tensor.dtype == stored[name].dtype, name


def test_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    for arguments, said in (
        (("Qwen9Config", "--layers", "1"), "no configuration class 'Qwen9Config'"),
        (("Qwen3_5TextConfig", "--layers", "1", "--set", "hiden_size=1"), "no fields ['hiden_size']"),
    ):
        done = run(*arguments, "--out", str(tmp_path / "model"))
        assert done.returncode == 1 and said in done.stderr and not (tmp_path / "model").exists()
