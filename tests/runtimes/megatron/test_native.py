"""The stock model under Megatron: a router's bias, a buffer of transformers' class, is exported and never rounded."""

from pathlib import Path

import torch
from megatron.core.transformer import TransformerConfig
from rank_cases import LATENT

from skyrl_isoexec.model import checkpoint, families
from skyrl_isoexec.runtimes.megatron.native import NativeModel
from skyrl_isoexec.runtimes.megatron.weights import dtypes, shapes


def test_a_bias_is_exported_in_fp32(tmp_path: Path) -> None:
    config = families.from_hf(LATENT, dtype="float32")
    tensors = dict(checkpoint.random_tensors(config, seed=5))
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert len(biases) == config.num_layers - config.first_dense_layers
    for number, name in enumerate(biases, start=3):
        tensors[name] = torch.linspace(-0.2, 0.2, len(tensors[name])) / number
    checkpoint.save(tmp_path / "model", LATENT, tensors)
    sizes = {
        "num_layers": config.num_layers,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
    }
    model = NativeModel(TransformerConfig(**sizes), tmp_path / "model", torch.bfloat16)
    found = model.export()
    assert found.keys() == tensors.keys() == shapes(model).keys()
    assert all(torch.equal(found[name], tensors[name]) for name in biases)
    assert dtypes(model, torch.bfloat16) == {
        name: torch.float32 if name in biases else torch.bfloat16 for name in found
    }
    state = {f"model.{name}": tensor for name, tensor in found.items()}
    assert not any(model.load_state_dict(state))
