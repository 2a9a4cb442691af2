"""Latent attention and a biased router: what transformers computes, its checkpoints in and out, refusals by name."""

import dataclasses

import pytest
import torch
from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

from skyrl_isoexec.model import checkpoint
from skyrl_isoexec.model.axes import SingleAxis
from skyrl_isoexec.model.checkpoint import LoadError
from skyrl_isoexec.model.config import EXPERT_FIELDS, DecoderConfig, check_partition
from skyrl_isoexec.model.families import Unsupported, from_hf, lookup
from skyrl_isoexec.model.latent import LatentAttention
from skyrl_isoexec.model.moe import MoE
from skyrl_isoexec.model.threads import run_ranks

# Sums in fp32 in other orders, as in test_against_transformers.
BOUND = 256 * 2**-24
CASES = {
    "as it is": {},
    "three experts, top 1": {"n_routed_experts": 3, "num_experts_per_tok": 1},
    "seven experts, top 4, one projection of queries": {
        "n_routed_experts": 7,
        "num_experts_per_tok": 4,
        "q_lora_rank": None,
    },
    "thirteen experts, top 8, biases, tied": {
        "n_routed_experts": 13,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 5,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "two of four groups of three, not renormalised": {
        "n_routed_experts": 12,
        "num_experts_per_tok": 5,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
    "one of three groups": {"n_routed_experts": 15, "num_experts_per_tok": 5, "n_group": 3},
    "two dense layers, three shared experts": {
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "n_shared_experts": 3,
        "routed_scaling_factor": 2.5,
    },
    "no dense layer": {"mlp_layer_types": ["sparse", "sparse", "sparse"], "num_experts_per_tok": 2},
    "halves rotated, another eps, wide latent": {
        "rope_interleave": False,
        "rms_norm_eps": 0.5,
        "kv_lora_rank": 37,
        "qk_nope_head_dim": 7,
        "v_head_dim": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def theirs(model: torch.nn.Module, sequences: list[list[int]]) -> torch.Tensor:
    return torch.cat([model(torch.tensor([s]), use_cache=False).logits[0] for s in sequences])


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_logits_and_gradients_of_transformers(m, fields) -> None:
    raw, model = m.make_hf("glm4_moe_lite", **fields)
    decoder = m.build(m.from_hf(raw), m.hf_tensors(model))
    ours, expected = m.forward(decoder), theirs(model, m.SEQUENCES)
    assert expected.abs().max() > 0.1
    assert (ours - expected).abs().max() <= BOUND * expected.abs().max()
    m.loss_of(ours).backward()
    m.loss_of(expected).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    learned = {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad}
    assert learned.keys() == gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    top1 = decoder.config.num_experts_per_tok == 1  # a token's weight is then 1 whatever its score
    for name, gradient in learned.items():
        assert (top1 and name.endswith("mlp.gate.weight")) or gradient.abs().max() > 0, name
        assert (gradient - gradients[name]).abs().max() <= BOUND * largest, name


def test_bfloat16_is_as_near_to_float32(m) -> None:
    """The latent form rounds elsewhere than the expanded one: its error is transformers', up to a quarter."""
    raw, model = m.make_hf("glm4_moe_lite", n_routed_experts=4, num_experts_per_tok=4)
    biases = {name: b for name, b in m.learned(model) if name.endswith("bias")}
    tensors = m.hf_tensors(model.bfloat16()) | biases
    with torch.no_grad():
        for name, bias in biases.items():
            model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = bias
        ours = m.forward(m.build(m.from_hf(raw | {"dtype": "bfloat16"}), tensors))
        rounded = theirs(model, m.SEQUENCES).float()
        expected = theirs(model.float(), m.SEQUENCES)
    errors = [(logits - expected).square().mean().sqrt() for logits in (ours, rounded)]
    assert 0 < errors[0] <= 1.25 * errors[1] and errors[1] <= 8 * 2**-8 * expected.abs().max()


def test_the_bias_chooses_and_does_not_weigh(m) -> None:
    """Raised for all experts alike it changes nothing; raised for one, every token has that one."""
    config, tensors = m.toy("glm4_moe_lite")
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(change: torch.Tensor | float) -> torch.Tensor:
        given = {name: t + change if name.endswith("correction_bias") else t for name, t in tensors.items()}
        decoder = m.build(config, given)
        chosen.clear()
        for layer in (part for part in decoder.modules() if isinstance(part, MoE)):
            layer.gate.register_forward_hook(lambda _, __, rows, layer=layer: chosen.append(layer.route(rows)))
        with torch.no_grad():
            return m.forward(decoder)

    plain, alike = run(0.0), run(8.0)
    assert torch.equal(plain, alike)
    assert (run(-tensors[BIAS]) != plain).any()
    one = torch.zeros(config.num_experts)
    one[6] = 8.0
    assert (run(one) != plain).any()
    assert len(chosen) == 2 and all((experts == 6).any(1).all() for _, experts in chosen)
    assert all((weights.sum(1) - config.router_scale).abs().max() < 1e-6 for weights, _ in chosen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_in_and_out(m, tmp_path, dtype) -> None:
    """transformers writes a matrix for each expert, and the bias in fp32; both sides read the other's."""
    raw, model = m.make_hf("glm4_moe_lite", attention_bias=True)
    biases = {name: b for name, b in m.learned(model) if name.endswith("correction_bias")}
    model = model.to(getattr(torch, dtype))
    for name, bias in biases.items():
        model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = bias
    model.save_pretrained(tmp_path / "a")
    split, whole = dict(checkpoint.iter_tensors(tmp_path / "a")), m.hf_tensors(model)
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in split and split[BIAS].dtype == torch.float32
    config = from_hf(checkpoint.read_config(tmp_path / "a"))
    assert config == from_hf(raw, dtype=dtype)
    assert checkpoint.dtypes(config) == {name: tensor.dtype for name, tensor in whole.items()}
    for given in (split, whole):
        exported = checkpoint.export(m.build(config, given))
        assert exported.keys() == whole.keys()
        for name, tensor in exported.items():
            m.assert_same_bits(tensor, whole[name])
    checkpoint.save(tmp_path / "b", checkpoint.export_config(tmp_path / "a"), exported)
    again, info = type(model).from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values())
    for (name, a), (_, b) in zip(m.learned(model), m.learned(again), strict=True):
        m.assert_same_bits(a.detach(), b.detach())
        assert name in exported


def test_the_bias_is_never_rounded(m) -> None:
    config, tensors = m.toy("glm4_moe_lite", dtype="bfloat16")
    exact = torch.full_like(tensors[BIAS], 1 + 2**-20)
    decoder = m.build(config, tensors | {BIAS: exact})
    m.assert_same_bits(checkpoint.export(decoder)[BIAS], exact)
    assert not checkpoint.load(decoder, tensors | {BIAS: exact}).rounded
    widened = checkpoint.load(decoder, tensors | {BIAS: exact.bfloat16()})
    assert not widened.rounded and (decoder.get_parameter(BIAS) == 1).all()
    m.loss_of(m.forward(decoder)).backward()
    assert decoder.get_parameter(BIAS).grad is None


def test_ranks_and_stages_take_their_heads(m) -> None:
    config, tensors = m.toy("glm4_moe_lite")
    stages = ({"last_layer": 2, "with_head": False}, {"first_layer": 2, "with_embedding": False})

    def run(axis):
        found = [m.build(config, tensors, axis, num_leaves=4, **stage) for stage in stages]
        return {name: p for stage in found for name, p in stage.named_parameters()}

    for size in (1, 2, 4):
        for rank, found in enumerate(run_ranks(size, run)):
            assert found.keys() == tensors.keys()
            for name, p in found.items():
                m.assert_same_bits(p.detach(), p.shard.slice(tensors[name], rank))
        cut = {name.rpartition("self_attn.")[2] for name, p in found.items() if p.shard.dim is not None}
        assert {"q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight"} <= cut
        assert not cut & {"q_a_proj.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight"}


def test_latents_that_skip_copy_in_lose_gradient(m, monkeypatch) -> None:
    """Otherwise the gradients of the whole parts would show nothing about where ranks are added."""
    toy = m.toy("glm4_moe_lite")
    name = "model.layers.2.self_attn.kv_a_proj_with_mqa.weight"

    def run(axis):
        decoder = m.build(*toy, axis, num_leaves=4)
        m.loss_of(m.forward(decoder)).backward()
        return decoder.get_parameter(name).grad

    expected = run(None)
    assert all((grad - expected).abs().max() <= BOUND * expected.abs().max() for grad in run_ranks(2, run))
    original = LatentAttention.forward

    def forward(self, *given):
        axis = self.place.axis
        axis.copy_in = lambda x: x
        try:
            return original(self, *given)
        finally:
            del axis.copy_in

    monkeypatch.setattr(LatentAttention, "forward", forward)
    assert all((grad - expected).abs().max() > 0.1 * expected.abs().max() for grad in run_ranks(2, run))


def test_the_layer_of_multi_token_prediction_is_left_out(m) -> None:
    config, tensors = m.toy("glm4_moe_lite")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(40, 80), "model.layers.3.mlp.gate.weight": torch.ones(8, 40)}
    report = checkpoint.load(m.build(config, tensors), tensors | extra)
    assert report.ignored.keys() == extra.keys() and set(report.loaded) == tensors.keys()
    assert all("multi-token prediction" in reason for reason in report.ignored.values())
    for name in ("model.layers.4.eh_proj.weight", "model.layers.2.eh_proj.weight", "model.layers.13.eh_proj.weight"):
        with pytest.raises(LoadError, match=f"unexpected {name}"):
            m.build(config, tensors | {name: torch.ones(3)})


# As published with GLM-4.7-Flash, in the fields that decide.
PUBLISHED = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def test_a_published_configuration() -> None:
    config = from_hf(PUBLISHED)
    assert config == DecoderConfig(
        family="glm4_moe_lite",
        vocab_size=154880,
        hidden_size=2048,
        intermediate_size=10240,
        num_layers=47,
        num_heads=20,
        num_kv_heads=20,
        head_dim=256,
        rms_norm_eps=1e-5,
        rope_theta=1000000,
        max_position=202752,
        kv_lora_rank=512,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        rope_interleaved=True,
        latent_norm_eps=1e-6,
        num_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        shared_expert_intermediate_size=1536,
        router_scoring="sigmoid",
        router_bias=True,
        router_renormalise=True,
        router_scale=1.8,
        router_eps=1e-20,
        first_dense_layers=1,
        dtype="bfloat16",
    )
    assert config.latent and config.latent_width == 576 and config.scale == 256**-0.5
    assert "mla" in config.operators and not {"attention", "gdn"} & set(config.operators)
    for tp in (1, 2, 4):
        check_partition(config, num_leaves=8, tp=tp)
    with pytest.raises(ValueError, match="num_heads = 20 is not divisible by tensor-parallel size 8"):
        check_partition(config, num_leaves=8, tp=8)


def test_names_and_shapes_are_those_of_transformers() -> None:
    raw = Glm4MoeLiteConfig().to_dict() | {"architectures": ["Glm4MoeLiteForCausalLM"], "dtype": "bfloat16"}
    rope = {"rope_type": "default", "rope_theta": 1000000}
    assert from_hf(raw | {"rope_parameters": rope}) == from_hf(PUBLISHED)
    with torch.device("meta"):
        model = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**PUBLISHED))
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    assert checkpoint.layout(from_hf(PUBLISHED)) == shapes and len(shapes) == 47 * 9 + 2 + 3 + 46 * 7 + 1
    kinds = checkpoint.dtypes(from_hf(PUBLISHED))
    assert sum(kind == torch.float32 for kind in kinds.values()) == 46


REFUSED = {
    "q_lora_rank": ({"q_lora_rank": ...}, "missing", "no default"),
    "kv_lora_rank": ({"kv_lora_rank": None}, "missing", "no default"),
    "n_routed_experts": ({"n_routed_experts": None}, "missing", "no default"),
    "norm_topk_prob": ({"norm_topk_prob": 1}, "1", "True or False"),
    "rope_interleave": ({"rope_interleave": "yes"}, "'yes'", "True or False"),
    "head_dim": ({"head_dim": 128}, "128", "64"),
    "qk_head_dim": ({"qk_head_dim": 128}, "128", "256"),
    "n_shared_experts": ({"n_shared_experts": 0}, "0", "a positive integer"),
    "num_local_experts": ({"num_local_experts": 32}, "32", "64"),
    "first_k_dense_replace": ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 45}, "1", "2, as mlp_layer_types"),
    "mlp_layer_types": ({"mlp_layer_types": ["sparse", "dense"]}, "['sparse', 'dense']", "before all others"),
    "num_nextn_predict_layers": ({"num_nextn_predict_layers": 2}, "2", "0 or 1"),
    "scoring_func": ({"scoring_func": "softmax"}, "'softmax'", "'sigmoid'"),
    "topk_method": ({"topk_method": "greedy"}, "'greedy'", "'noaux_tc'"),
    "output_router_logits": ({"output_router_logits": True}, "True", "False"),
    "rope_type": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'", "llama3"),
    "index_topk": ({"index_topk": 2048}, "2048", "its absence"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_family_refuses(name) -> None:
    changes, *words = REFUSED[name]
    raw = {field: value for field, value in (PUBLISHED | changes).items() if value is not ...}
    with pytest.raises(Unsupported) as error:
        from_hf(raw)
    assert all(word in str(error.value) for word in (f"field {name} ", *words)), error.value


def test_spellings_of_dense_layers() -> None:
    kinds = ["dense"] + ["sparse"] * 46
    plain = {name: value for name, value in PUBLISHED.items() if name != "first_k_dense_replace"}
    for given in (plain, plain | {"mlp_layer_types": kinds}, PUBLISHED | {"mlp_layer_types": kinds}):
        assert from_hf(given) == from_hf(PUBLISHED)
    none = from_hf(plain | {"first_k_dense_replace": 0})
    assert (none.first_dense_layers, none.intermediate_size) == (0, None)
    assert from_hf(plain | {"q_lora_rank": None}).q_lora_rank is None
    for given in ({"first_k_dense_replace": 47}, {"mlp_layer_types": ["dense"] * 47}):
        with pytest.raises(ValueError, match="first_dense_layers = 47 must be|mlp_layer_types = .* not supported"):
            from_hf(plain | given)
    assert lookup("glm4_moe_lite").reason("model.layers.47.eh_proj.weight", 47)


DENSE = {name: DecoderConfig.__dataclass_fields__[name].default for name in EXPERT_FIELDS}
INVALID = {
    "no latent": ("qwen3", {"q_lora_rank": 4}, ["q_lora_rank = 4", "no attention is latent"]),
    "interleaved without one": ("qwen3", {"rope_interleaved": True}, ["rope_interleaved = True"]),
    "no values": ("glm4_moe_lite", {"v_head_dim": None}, ["v_head_dim = None"]),
    "no eps": ("glm4_moe_lite", {"latent_norm_eps": None}, ["latent_norm_eps = None"]),
    "a rank": ("glm4_moe_lite", {"q_lora_rank": 0}, ["q_lora_rank = 0"]),
    "an odd rotation": ("glm4_moe_lite", {"qk_rope_head_dim": 3, "head_dim": 9}, ["qk_rope_head_dim = 3", "even"]),
    "a width": ("glm4_moe_lite", {"head_dim": 12}, ["head_dim = 12 must be 10"]),
    "fewer keys": ("glm4_moe_lite", {"num_kv_heads": 4}, ["num_kv_heads = 4 must be 8"]),
    "head norms": ("glm4_moe_lite", {"qk_norm": True}, ["qk_norm = True", "latent attention"]),
    "a gate": ("glm4_moe_lite", {"attention_gate": True}, ["attention_gate = True"]),
    "centred norms": ("glm4_moe_lite", {"zero_centred_norm": True}, ["zero_centred_norm = True", "latent attention"]),
    "dense layers alone": ("glm4_moe_lite", DENSE, ["num_experts = None", "latent attention"]),
    "part of a head": ("glm4_moe_lite", {"rotary_dim": 4}, ["rotary_dim = 4"]),
    "a hybrid": (
        "glm4_moe_lite",
        {
            "full_attention_interval": 3,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 5,
            "linear_conv_kernel_dim": 4,
        },
        ["full_attention_interval = 3"],
    ),
    "a bias for nobody": ("qwen3", {"router_bias": True}, ["router_bias = True", "no experts"]),
}


@pytest.mark.parametrize("family, changes, words", INVALID.values(), ids=INVALID.keys())
def test_what_a_configuration_refuses(m, family, changes, words) -> None:
    with pytest.raises(ValueError) as error:
        m.toy(family, **changes)
    assert all(word in str(error.value) for word in words), error.value


def test_a_partition_that_does_not_fit_is_refused(m) -> None:
    config, _ = m.toy("glm4_moe_lite")
    with pytest.raises(ValueError, match="num_heads \\* v_head_dim = 40 is not divisible by schedule.num_leaves = 16"):
        check_partition(dataclasses.replace(config, vocab_size=48), num_leaves=16, tp=1)


def test_a_model_without_the_operator_is_refused(m) -> None:
    config, tensors = m.toy("glm4_moe_lite")
    with pytest.raises(ValueError, match=r"the model needs \['mla'\]"):
        m.build(config, tensors, impl={op: "cpu" for op in config.operators if op != "mla"})
    assert m.build(config, tensors, SingleAxis(), impl={op: "cpu" for op in config.operators}).config.latent
