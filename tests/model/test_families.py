"""A Hugging Face configuration is honoured in full or refused by field, value and what is supported."""

import pytest

from skyrl_isoexec.model import families
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.families import Unsupported, detect, from_hf, lookup

# As published checkpoints spell it: before rope_parameters.
OLD = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def as_family(name: str, **fields: object) -> dict[str, object]:
    """OLD under another family's names."""
    family = lookup(name)
    return OLD | {"architectures": list(family.architectures), "model_type": family.model_types[0]} | fields


def test_a_published_configuration() -> None:
    assert from_hf(OLD) == DecoderConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000,
        max_position=40960,
        qk_norm=True,
        tied_head=True,
        dtype="bfloat16",
    )


def test_published_mimo() -> None:
    config = from_hf(
        as_family(
            "mimo",
            attention_bias=True,
            hidden_size=4096,
            intermediate_size=11008,
            max_window_layers=32,
            num_attention_heads=32,
            num_hidden_layers=36,
            num_nextn_predict_layers=1,
            rms_norm_eps=1e-05,
            rope_theta=640000,
            sliding_window=32768,
            tie_word_embeddings=False,
            use_mrope=False,
            vocab_size=151680,
        )
    )
    assert (config.num_layers, config.head_dim, config.rope_theta, config.qkv_bias) == (36, 128, 640000, True)


def test_both_spellings_of_the_rope_agree() -> None:
    new = {k: v for k, v in as_family("llama").items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = LLAMA3 | {"rope_theta": 500000.0}
    old = as_family("llama", rope_theta=500000.0, rope_scaling=LLAMA3)
    legacy = {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()}
    assert from_hf(new) == from_hf(old) == from_hf(old | {"rope_scaling": legacy})
    assert from_hf(new).rope_theta == 500000.0 and from_hf(new).rope_scaling["factor"] == 32.0


def test_biases_by_family() -> None:
    def biases(name, **fields):
        config = from_hf(as_family(name, **fields))
        return config.qkv_bias, config.o_bias, config.qk_norm

    assert biases("llama") == (False, False, False)
    assert biases("llama", attention_bias=True) == (True, True, False)
    assert biases("qwen3", attention_bias=True) == (True, True, True)
    assert biases("qwen2", attention_bias=None) == (True, False, False)
    assert biases("mimo", attention_bias=True, num_nextn_predict_layers=1) == (True, False, False)


def test_implied_values() -> None:
    llama = {k: v for k, v in as_family("llama").items() if k not in ("head_dim", "num_key_value_heads", "torch_dtype")}
    config = from_hf(llama)
    assert (config.head_dim, config.num_kv_heads, config.dtype) == (64, 16, "float32")
    assert from_hf(llama, dtype="bfloat16").dtype == "bfloat16"


def test_a_window_that_is_not_in_use() -> None:
    unused = as_family("qwen2", attention_bias=None, sliding_window=4096)
    assert from_hf(unused) == from_hf(as_family("qwen2", attention_bias=None))
    assert from_hf(unused | {"layer_types": ["full_attention"] * 28})
    assert from_hf(unused | {"use_sliding_window": True})  # from layer 28 of 28


REFUSED = {
    "hidden_act": (as_family("qwen3", hidden_act="gelu"), "'gelu'", "'silu'"),
    "sliding_window": (
        as_family("qwen3", use_sliding_window=True, sliding_window=4096, max_window_layers=3),
        "4096",
        "none in use",
    ),
    "layer_types": (
        as_family("qwen3", layer_types=["full_attention", "sliding_attention"]),
        "'sliding_attention'",
        "full_attention",
    ),
    "rope_type": (as_family("llama", rope_scaling={"rope_type": "yarn", "factor": 4.0}), "'yarn'", "default, llama3"),
    "rope_parameters": (as_family("llama", rope_scaling={"rope_type": "llama3"}), "{}", "low_freq_factor"),
    "rope_theta": (as_family("llama", rope_parameters={"rope_theta": 5.0}), "1000000", "5.0"),
    "rope_scaling.type": (
        as_family("llama", rope_scaling={"rope_type": "llama3", "type": "linear"}),
        "linear",
        "llama3",
    ),
    "rope_parameters.factor": (
        as_family("llama", rope_scaling={"factor": 1.0}, rope_parameters={"factor": 2.0}),
        "2.0",
        "1.0",
    ),
    "rope_parameters.low_freq_factor": (
        as_family("llama", rope_scaling={"factor": 1.0}, rope_parameters={"low_freq_factor": 2.0}),
        "2.0",
        "None, as rope_scaling says",
    ),
    "partial_rotary_factor": (as_family("llama", partial_rotary_factor=0.5), "0.5", "1"),
    "attn_logit_softcapping": (as_family("llama", attn_logit_softcapping=50.0), "50.0", "absence"),
    "logit_scale": (as_family("llama", logit_scale=0), "0", "absence"),
    "attention_dropout": (as_family("llama", attention_dropout=0.1), "0.1", "0"),
    "mlp_bias": (as_family("llama", mlp_bias=True), "True", "False"),
    "quantization_config": (as_family("llama", quantization_config={"bits": 4}), "bits", "absence"),
    "num_nextn_predict_layers": (as_family("qwen3", num_nextn_predict_layers=1), "1", "absence"),
    "attention_bias": (as_family("qwen2"), "False", "True"),
    "dtype": (as_family("llama", torch_dtype="float16"), "'float16'", "bfloat16"),
    "head_dim": ({k: v for k, v in OLD.items() if k != "head_dim"}, "None", "explicit"),
    "rms_norm_eps": ({k: v for k, v in OLD.items() if k != "rms_norm_eps"}, "rms_norm_eps", "missing"),
    "model_type": (OLD | {"model_type": "qwen2"}, "'qwen2'", "mimo: MiMoForCausalLM"),
    "architectures": (OLD | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "Gemma", "qwen2: Qwen2For"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_field_value_and_what_is_supported(name) -> None:
    raw, value, supported = REFUSED[name]
    with pytest.raises(Unsupported) as error:
        from_hf(raw)
    assert name in str(error.value) and value in str(error.value) and supported in str(error.value)


def test_mimo_must_keep_its_biases() -> None:
    with pytest.raises(Unsupported, match="attention_bias"):
        from_hf(as_family("mimo", attention_bias=False))


@pytest.mark.parametrize(
    "field, value",
    [
        ("head_dim", 7),
        ("num_kv_heads", 3),
        ("dtype", "float16"),
        ("num_layers", 0),
        ("vocab_size", True),
        ("rms_norm_eps", 0.0),
        ("rope_theta", float("inf")),
        ("tied_head", 1),
        ("rope_scaling", {"factor": 2.0}),
    ],
)
def test_impossible_descriptions_are_refused(m, field, value) -> None:
    with pytest.raises(ValueError, match=field):
        m.toy(**{field: value})


def test_detection() -> None:
    assert detect({"model_type": "llama"}).name == "llama"
    assert detect({"architectures": ["MiMoForCausalLM"]}).name == "mimo"
    assert detect({"architectures": ["IsoExecForCausalLM"], "model_type": "qwen2"}).name == "qwen2"
    assert sorted(families.FAMILIES) == [
        "glm4_moe_lite",
        "llama",
        "mimo",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
    ]
    for kind in ("qwen3_5", "qwen3_5_text"):
        assert detect({"model_type": kind}).name == "qwen3_5"
    for unknown in ({}, {"architectures": ["IsoExecForCausalLM"]}, {"architectures": ["A"], "model_type": "qwen2"}):
        with pytest.raises(Unsupported):
            detect(unknown)
    with pytest.raises(Unsupported, match="gpt2.*llama, mimo, qwen2, qwen3, qwen3_5"):
        lookup("gpt2")


def test_to_dict_is_plain_data() -> None:
    config = from_hf(as_family("llama", rope_scaling=LLAMA3))
    assert DecoderConfig(**config.to_dict()) == config
    assert from_hf(OLD).to_dict()["rope_scaling"] is None
