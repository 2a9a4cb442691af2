"""Qwen3.5, text alone or with a vision tower around it: read as transformers reads it, or refused."""

import copy
import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from skyrl_isoexec.model import checkpoint
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.families import Unsupported, from_hf, lookup
from skyrl_isoexec.model.rope import inverse_frequencies

# As published with Qwen3.5-0.8B.
TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3584,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 248320,
}
WHOLE = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "tie_word_embeddings": True,
    "transformers_version": "5.8.0",
    "video_token_id": 248057,
    "vision_config": {"depth": 12, "hidden_size": 768, "model_type": "qwen3_5_vision", "num_heads": 12},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 40}
VISION |= {"patch_size": 4, "num_position_embeddings": 16}


def text(**fields: object) -> dict[str, object]:
    """The text part alone, with other values, or without fields that are given as Ellipsis."""
    raw = copy.deepcopy(TEXT) | {"architectures": ["Qwen3_5ForCausalLM"]} | fields
    return {name: value for name, value in raw.items() if value is not ...}


def whole(**fields: object) -> dict[str, object]:
    """The whole configuration, with other values in the text part."""
    return copy.deepcopy(WHOLE) | {"text_config": {k: v for k, v in (TEXT | fields).items() if v is not ...}}


def test_a_published_configuration() -> None:
    assert (
        from_hf(WHOLE)
        == from_hf(text())
        == DecoderConfig(
            family="qwen3_5",
            vocab_size=248320,
            hidden_size=1024,
            intermediate_size=3584,
            num_layers=24,
            num_heads=8,
            num_kv_heads=2,
            head_dim=256,
            rms_norm_eps=1e-6,
            rope_theta=10000000,
            max_position=262144,
            qk_norm=True,
            rotary_dim=64,
            attention_gate=True,
            zero_centred_norm=True,
            full_attention_interval=4,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            tied_head=True,
            dtype="bfloat16",
        )
    )


def test_names_and_shapes_are_those_of_transformers() -> None:
    """Of the published model: every tensor that its class has, no other."""
    with torch.device("meta"):
        theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text()))
    shapes = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert checkpoint.layout(from_hf(WHOLE)) == shapes and len(shapes) == 320


@pytest.mark.parametrize(
    "fields, rotated, theta",
    [
        ({}, 64, 10000000),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}}, 128, 50.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, 64, 50.0),
        ({"rope_parameters": {"rope_theta": 50.0}, "partial_rotary_factor": 1.0}, 256, 50.0),
        ({"rope_parameters": ..., "partial_rotary_factor": ...}, 64, 10000.0),
        ({"rope_parameters": ..., "partial_rotary_factor": 0.75, "rope_theta": 7.0}, 192, 7.0),
        ({"rope_parameters": ..., "rope_scaling": {"mrope_section": [1, 1, 1], "rope_theta": 9.0}}, 64, 9.0),
    ],
)
def test_rotated_part_as_transformers_reads_it(fields, rotated, theta) -> None:
    """The factor in the rope's parameters goes before the one beside them, which a saved configuration repeats."""
    raw = text(**fields)
    config = from_hf(raw)
    assert (config.rotary_dim or config.head_dim, config.rope_theta) == (rotated, theta)
    theirs = Qwen3_5TextConfig(**copy.deepcopy(raw))
    assert from_hf(theirs.to_dict()) == config
    steps = torch.tensor(inverse_frequencies(config))
    torch.testing.assert_close(Qwen3_5TextRotaryEmbedding(theirs).inv_freq, steps, rtol=1e-5, atol=0)


def test_sections_of_mrope_change_no_angle_of_text() -> None:
    """The same three positions, in whatever sections."""
    one, other = (
        Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**text(rope_parameters=TEXT["rope_parameters"] | sections)))
        for sections in ({"mrope_section": [11, 11, 10]}, {"mrope_section": [32, 0, 0]})
    )
    positions = torch.arange(50)[None]
    for a, b in zip(one(torch.ones(1), positions), other(torch.ones(1), positions), strict=True):
        assert torch.equal(a, b)
    pictures = torch.stack([positions, 2 * positions, 3 * positions])
    assert not torch.equal(one(torch.ones(1), pictures)[0], other(torch.ones(1), pictures)[0])


def test_which_layers_attend() -> None:
    def layers(**fields: object) -> list[int]:
        config = from_hf(text(**fields))
        return [layer for layer in range(config.num_layers) if config.attends(layer)]

    assert layers() == layers(layer_types=...) == layers(full_attention_interval=...) == [3, 7, 11, 15, 19, 23]
    short = {"num_hidden_layers": 5, "full_attention_interval": ...}
    linear, full = "linear_attention", "full_attention"
    assert layers(**short, layer_types=[linear, full, linear, full, linear]) == [1, 3]
    assert layers(**short, layer_types=[full] * 5) == [0, 1, 2, 3, 4]
    assert not from_hf(text(**short, layer_types=[full] * 5)).hybrid


def test_what_the_parts_say_together() -> None:
    """Where the text part is silent, the whole speaks for it; the engine's dtype goes before both."""
    assert from_hf(whole(dtype=...)).dtype == "bfloat16"
    assert from_hf(whole(dtype="float32")).dtype == "float32"
    assert from_hf(whole(dtype="float16"), dtype="bfloat16").dtype == "bfloat16"
    assert from_hf(whole(tie_word_embeddings=...)).tied_head
    assert not from_hf(whole(tie_word_embeddings=...) | {"tie_word_embeddings": None}).tied_head
    assert from_hf(whole(attention_bias=True)).o_bias and from_hf(text(attention_bias=True)).qkv_bias


MIXED = ["linear_attention", "full_attention"] * 12
MIXED[6] = "full_attention"
REFUSED = {
    "layer_types[6]": (text(layer_types=MIXED), "'full_attention'", "'linear_attention'"),
    "layer_types[1]": (
        text(layer_types=["linear_attention", "sliding_attention", *["full_attention"] * 22]),
        "sliding",
        "linear",
    ),
    "layer_types": (text(layer_types=["linear_attention"] * 24), "linear_attention", "'full_attention'"),
    "full_attention_interval": (text(full_attention_interval=2), "2", "4, as layer_types says"),
    "linear_num_key_heads": (text(linear_num_key_heads=...), "linear_num_key_heads", "missing"),
    "linear_num_value_heads": (text(linear_num_value_heads=24), "24", "16"),
    "num_key_value_heads": (text(num_key_value_heads=...), "num_key_value_heads", "missing"),
    "head_dim": (text(head_dim=...), "head_dim", "missing"),
    "partial_rotary_factor": (text(rope_parameters={"partial_rotary_factor": 0.003}), "0.003", "head_dim = 256"),
    "rope_parameters.partial_rotary_factor": (
        text(rope_scaling={"partial_rotary_factor": 0.5}),
        "0.25",
        "0.5, as rope_scaling says",
    ),
    "rope_type": (text(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "'yarn'", "default"),
    "attn_output_gate": (text(attn_output_gate=False), "False", "True"),
    "mamba_ssm_dtype": (text(mamba_ssm_dtype="bfloat16"), "'bfloat16'", "'float32'"),
    "hidden_act": (whole(hidden_act="gelu"), "'gelu'", "'silu'"),
    "mlp_only_layers": (whole(mlp_only_layers=[3]), "[3]", "absence"),
    "num_experts": (whole(num_experts=8), "8", "absence"),
    "output_gate_type": (text(output_gate_type="sigmoid"), "sigmoid", "absence"),
    "quantization_config": (WHOLE | {"quantization_config": {"bits": 4}}, "bits", "absence"),
    "audio_config": (WHOLE | {"audio_config": {"depth": 4}}, "depth", "absence"),
    "text_config": ({k: v for k, v in WHOLE.items() if k != "text_config"}, "None", "qwen3_5_text"),
    "text_config.model_type": (whole(model_type="qwen3_5_moe_text"), "moe", "'qwen3_5_text'"),
    "text_config.tie_word_embeddings": (whole(tie_word_embeddings=False), "False", "whole"),
    "model_type": (text(model_type="qwen3"), "'qwen3'", "qwen3_5_text, qwen3_5: Qwen3_5ForCausalLM"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_field_value_and_what_is_supported(name) -> None:
    raw, value, supported = REFUSED[name]
    with pytest.raises(ValueError) as error:
        from_hf(raw)
    assert name in str(error.value) and value in str(error.value) and supported in str(error.value)


def test_an_interval_without_a_layer_that_attends_is_refused() -> None:
    for interval in (25, 0, "4", True):
        with pytest.raises(Unsupported, match="full_attention_interval.*num_hidden_layers = 24"):
            from_hf(text(layer_types=..., full_attention_interval=interval))


@pytest.fixture(scope="module")
def pictures(m):
    """(decoder's tensors, transformers' model with a vision tower), the text part random."""
    raw, model = m.make_hf("qwen3_5")
    fields = {k: v for k, v in raw.items() if k not in ("architectures", "dtype")}
    around = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=fields, vision_config=VISION))
    missing, extra = around.model.language_model.load_state_dict(model.model.state_dict())
    around.lm_head.load_state_dict(model.lm_head.state_dict())
    assert not missing and not extra
    return m.hf_tensors(model), around


def test_the_text_part_of_a_checkpoint_with_pictures(m, pictures, tmp_path) -> None:
    """What comes out is the text part alone, under its own names, and loads as such."""
    tensors, around = pictures
    around.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    config = from_hf(checkpoint.read_config(tmp_path / "whole"))
    decoder = m.build(config, checkpoint.iter_tensors(tmp_path / "whole"))
    report = checkpoint.load(decoder, checkpoint.iter_tensors(tmp_path / "whole"))
    assert set(report.loaded) == set(tensors) and not report.elsewhere and not report.rounded
    assert report.ignored and all(name.startswith("model.visual.") for name in report.ignored)
    exported = checkpoint.export(decoder)
    assert exported.keys() == tensors.keys()
    for name, tensor in exported.items():
        m.assert_same_bits(tensor, tensors[name])
    checkpoint.save(tmp_path / "text", checkpoint.export_config(tmp_path / "whole"), exported, 20_000)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert type(again) is Qwen3_5ForCausalLM and not any(info.values())
    for name, p in again.named_parameters():
        m.assert_same_bits(p.detach(), tensors[name])
    assert from_hf(checkpoint.read_config(tmp_path / "text")) == config


def test_text_that_transformers_took_out_of_pictures(m, pictures, tmp_path) -> None:
    """Its configuration is text's, its tensors still have the names of the whole."""
    tensors, around = pictures
    around.save_pretrained(tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "text")
    raw = checkpoint.read_config(tmp_path / "text")
    names = [name for name, _ in checkpoint.iter_tensors(tmp_path / "text")]
    assert raw["model_type"] == "qwen3_5_text" and "model.language_model.norm.weight" in names
    decoder = m.build(from_hf(raw), checkpoint.iter_tensors(tmp_path / "text"))
    for name, tensor in checkpoint.export(decoder).items():
        m.assert_same_bits(tensor, tensors[name])
    assert json.loads(checkpoint.export_config(tmp_path / "text")) == raw


def test_names() -> None:
    family = lookup("qwen3_5")
    assert family.own_name("model.language_model.norm.weight") == family.own_name("model.norm.weight")
    assert family.own_name("lm_head.weight") == "lm_head.weight"
    assert family.reason("mtp.fc.weight", 2) and family.reason("model.visual.pos_embed.weight", 2)
    assert family.reason("model.layers.0.mlp.up_proj.weight", 2) is None
    assert AutoConfig.for_model("qwen3_5_text").model_type in family.model_types
