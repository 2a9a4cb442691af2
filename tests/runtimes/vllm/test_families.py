"""Every family the model knows runs in the engine, with the configuration a trainer reads from the folder."""

import pytest

torch = pytest.importorskip("torch")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "qwen3": {"attention_bias": True},
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64},
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_bias": None,
        "head_dim": 16,
        "use_sliding_window": False,
        "sliding_window": 64,
    },
    "mimo": {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(start, checkpoint, reference, prompts, generate, compare, family: str) -> None:
    """Equal configurations, equal bits."""
    from skyrl_isoexec.model import families
    from skyrl_isoexec.model.checkpoint import read_config

    folder = checkpoint("bfloat16", **FAMILIES[family])
    engine = start(folder, "bfloat16", family=family)
    mismatched, compared = compare(reference(folder), prompts, generate(engine, prompts))
    assert mismatched == 0 and compared == 32 * len(prompts)
    (config,) = engine.apply_model(lambda model: model.config)
    assert config == families.from_hf(read_config(folder)) and config.family == family


def test_another_family_than_the_checkpoints(start, checkpoint) -> None:
    """Settings of one family over a checkpoint of another: refused, not loaded in part."""
    with pytest.raises(Exception, match="head_dim|q_norm|unexpected"):
        start(checkpoint("float32"), "float32", family="llama")
