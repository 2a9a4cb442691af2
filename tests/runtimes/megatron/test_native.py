"""The stock model under Megatron: it exports and loads the tensors of a checkpoint, all of which are parameters."""

from pathlib import Path

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from rank_cases import DENSE, HYBRID

from skyrl_isoexec.model import checkpoint, families
from skyrl_isoexec.runtimes.megatron.native import NativeModel
from skyrl_isoexec.runtimes.megatron.weights import dtypes, shapes


@pytest.mark.parametrize("hf", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_it_exports_what_a_checkpoint_has(hf: dict, tmp_path: Path) -> None:
    """No buffer among it: of the families that this arm takes, those with experts are refused before."""
    config = families.from_hf(hf, dtype="float32")
    tensors = dict(checkpoint.random_tensors(config, seed=5))
    checkpoint.save(tmp_path / "model", hf, tensors)
    sizes = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "use_cpu_initialization": True,
    }
    model = NativeModel(TransformerConfig(**sizes), tmp_path / "model", torch.bfloat16)
    kept = model.model.state_dict().keys() - ({"lm_head.weight"} if config.tied_head else set())
    found = model.export()
    assert found.keys() == tensors.keys() == shapes(model).keys() == kept
    assert all(torch.equal(found[name], tensors[name].bfloat16()) for name in found)
    assert set(dtypes(model).values()) == {torch.bfloat16}
    assert set(dtypes(model, torch.float32).values()) == {torch.float32}
    assert not any(model.load_state_dict({f"model.{name}": tensor for name, tensor in found.items()}))
