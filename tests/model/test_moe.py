"""A mixture of experts: the logits of transformers, the same bits on any cut, and no token changes an expert."""

import dataclasses

import pytest
import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from skyrl_isoexec.kernels.numeric.inputs import ties_at_the_cut
from skyrl_isoexec.kernels.router.reference import scores
from skyrl_isoexec.model import checkpoint
from skyrl_isoexec.model.axes import Axis, SingleAxis
from skyrl_isoexec.model.checkpoint import LoadError
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.model.families import Unsupported, from_hf, lookup
from skyrl_isoexec.model.moe import MoE
from skyrl_isoexec.model.threads import run_ranks

# Sums in fp32 in other orders, as in test_against_transformers; a hybrid adds sums over a sequence, and divisions.
BOUNDS = {"qwen3_moe": 256 * 2**-24, "qwen3_5_moe": 1536 * 2**-24}
CASES = {
    "three experts, top 1": ("qwen3_moe", {"num_experts": 3, "num_experts_per_tok": 1, "norm_topk_prob": True}),
    "top 1 not renormalised": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "seven experts, top 4, tied": (
        "qwen3_moe",
        {"num_experts": 7, "num_experts_per_tok": 4, "tie_word_embeddings": True},
    ),
    "thirteen experts, top 8": (
        "qwen3_moe",
        {"num_experts": 13, "num_experts_per_tok": 8, "norm_topk_prob": True, "moe_intermediate_size": 5},
    ),
    "all of eight experts": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 8, "attention_bias": True}),
    "dense first": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [0, 1], "norm_topk_prob": True}),
    "hybrid": ("qwen3_5_moe", {"shared_expert_intermediate_size": 20}),
    "hybrid, nine experts, top 8": (
        "qwen3_5_moe",
        {"num_experts": 9, "num_experts_per_tok": 8, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 3},
    ),
    "attention alone, one expert": (
        "qwen3_5_moe",
        {
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "shared_expert_intermediate_size": 20,
            "full_attention_interval": 1,
            "num_hidden_layers": 2,
        },
    ),
}
TWINS = (2, 5)
EXPERTS = "model.layers.0.mlp.experts"


def theirs(model: torch.nn.Module, sequences: list[list[int]]) -> torch.Tensor:
    return torch.cat([model(torch.tensor([s]), use_cache=False).logits[0] for s in sequences])


def twins(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with two experts of every layer whose scores tie in every token."""
    for name, tensor in tensors.items():
        if ".mlp.gate." in name:
            tensor[TWINS[1]] = tensor[TWINS[0]]
    return tensors


def choices(m, decoder: Decoder, sequences: list[list[int]]) -> tuple[torch.Tensor, int]:
    """([layers, tokens, K] experts, how many of these choices a tie decides)."""
    layers = [part for part in decoder.modules() if isinstance(part, MoE)]
    logits: list[torch.Tensor] = []
    hooks = [layer.gate.register_forward_hook(lambda _, __, rows: logits.append(rows)) for layer in layers]
    with torch.no_grad():
        m.forward(decoder, sequences)
    for hook in hooks:
        hook.remove()
    chosen = [layer.route(rows)[1] for layer, rows in zip(layers, logits, strict=True)]
    if decoder.config.router_bias:
        biases = [layer.gate.e_score_correction_bias for layer in layers]
        logits = [scores(rows, at.rule) + bias for at, rows, bias in zip(layers, logits, biases, strict=True)]
    return torch.stack(chosen), sum(map(ties_at_the_cut, logits, chosen))


@pytest.mark.parametrize("family, fields", CASES.values(), ids=CASES.keys())
def test_logits_and_gradients_of_transformers(m, family, fields) -> None:
    raw, model = m.make_hf(family, **fields)
    decoder = m.build(m.from_hf(raw), m.hf_tensors(model), gdn_chunk=64)
    sequences, bound = m.LONG if family == "qwen3_5_moe" else m.SEQUENCES, BOUNDS[family]
    ours, expected = m.forward(decoder, sequences), theirs(model, sequences)
    assert expected.abs().max() > 0.1
    assert (ours - expected).abs().max() <= bound * expected.abs().max()
    m.loss_of(ours, sequences).backward()
    m.loss_of(expected, sequences).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert dict(decoder.named_parameters()).keys() == gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, p in decoder.named_parameters():
        alone = decoder.config.num_experts == 1 and name.endswith(
            "mlp.gate.weight"
        )  # its weight is 1 whatever its score
        assert alone or p.grad.abs().max() > 0, name
        assert (p.grad - gradients[name]).abs().max() <= bound * largest, name


def test_ties_give_the_logits_of_transformers(m) -> None:
    """Twins that are one expert: whichever of them is chosen, the output is the same."""
    raw, model = m.make_hf("qwen3_moe", num_experts=9, num_experts_per_tok=3, norm_topk_prob=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".mlp." in name:
                p[TWINS[1]] = p[TWINS[0]]
    decoder = m.build(m.from_hf(raw), m.hf_tensors(model))
    chosen, ties = choices(m, decoder, m.SEQUENCES)
    assert ties > 3 and (chosen == TWINS[0]).sum() > (chosen == TWINS[1]).sum() > 0
    with torch.no_grad():
        ours, expected = m.forward(decoder), theirs(model, m.SEQUENCES)
    assert (ours - expected).abs().max() <= BOUNDS["qwen3_moe"] * expected.abs().max()


def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(m) -> None:
    """Our weights stay fp32, our sum is rounded once. Both may choose other experts than fp32 does: so on average."""
    raw, model = m.make_hf("qwen3_moe", norm_topk_prob=True)
    tensors = m.hf_tensors(model.bfloat16())
    with torch.no_grad():
        ours = m.forward(m.build(m.from_hf(raw | {"dtype": "bfloat16"}), tensors))
        rounded, expected = theirs(model, m.SEQUENCES).float(), theirs(model.float(), m.SEQUENCES)
    errors = [(logits - expected).square().mean().sqrt() for logits in (ours, rounded)]
    assert 0 < errors[0] <= 1.25 * errors[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "glm4_moe_lite"])
def test_no_expert_flips(m, family, dtype) -> None:
    """Packed, alone, in the opposite order, and on every rank of an axis; ties and ranks without a row among them."""
    config, tensors = m.toy(family, dtype=dtype)
    tensors = twins(tensors)
    chosen, ties = choices(m, m.build(config, tensors, num_leaves=4), m.SEQUENCES)
    assert ties > 3
    parts = chosen.split([len(sequence) for sequence in m.SEQUENCES], dim=1)
    flips, compared, idle = 0, 0, 0

    def run(axis: Axis) -> list[tuple[torch.Tensor, int]]:
        decoder = m.build(config, tensors, axis, num_leaves=4)
        alone = [choices(m, decoder, [sequence]) for sequence in m.SEQUENCES]
        return [*alone, choices(m, decoder, m.SEQUENCES[::-1])]

    for size in (1, 2, 4):
        for results in run_ranks(size, run):
            for expected, (found, _) in zip((*parts, torch.cat(parts[::-1], 1)), results, strict=True):
                flips, compared = flips + int((found != expected).sum()), compared + found.numel()
                owners = [set((layer // (config.num_experts // size)).flatten().tolist()) for layer in found]
                idle += sum(len(owner) < size for owner in owners)
    assert flips == 0 and compared == 7 * 2 * chosen.numel() and idle > 0


def test_a_sum_over_ranks_would_have_other_bits(m, monkeypatch) -> None:
    """Otherwise the equality of degrees would prove nothing about whose rows are added when."""
    config, tensors = m.toy("qwen3_moe")

    def summed(self: MoE, x_TH: torch.Tensor) -> torch.Tensor:
        kernels, axis = self.place.kernels, self.place.axis
        weights_TK, experts_TK = kernels.route(self.gate(x_TH, torch.float32), self.top_k, self.rule)
        order_S, starts_E1 = kernels.dispatch(experts_TK, self.num_experts)
        own_SH = self._own_rows(kernels.expand(x_TH, order_S), starts_E1)
        return axis.sum(kernels.combine(own_SH, order_S, weights_TK))

    def run(axis: Axis | None) -> torch.Tensor:
        with torch.no_grad():
            return m.forward(m.build(config, tensors, axis, num_leaves=4))

    expected = run(None)
    assert all(torch.equal(logits, expected) for logits in run_ranks(4, run))
    monkeypatch.setattr(MoE, "forward", summed)
    assert torch.equal(run(None), expected)
    assert all((logits != expected).any() for logits in run_ranks(4, run))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_both_forms_of_a_checkpoint_are_read_and_ours_by_transformers(m, tmp_path, family) -> None:
    """transformers writes a matrix for each expert; we write the tensors that its modules have."""
    raw, model = m.make_hf(family)
    model.save_pretrained(tmp_path / "a")
    split = dict(checkpoint.iter_tensors(tmp_path / "a"))
    whole = m.hf_tensors(model)
    assert f"{EXPERTS}.4.up_proj.weight" in split and f"{EXPERTS}.gate_up_proj" not in split
    config = from_hf(checkpoint.read_config(tmp_path / "a"))
    assert config == from_hf(raw)
    decoder = m.build(config, split)
    for found in (decoder, m.build(config, whole)):
        exported = checkpoint.export(found)
        assert exported.keys() == whole.keys()
        for name, tensor in exported.items():
            m.assert_same_bits(tensor, whole[name])
    checkpoint.save(tmp_path / "b", raw, checkpoint.export(decoder))
    again, info = type(model).from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values())
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with a matrix for each expert."""
    split = {}
    for name, tensor in tensors.items():
        at, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(tensor if at.endswith(".experts") else ()):
            halves = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            split |= {f"{at}.{expert}.{kind}.weight": half for kind, half in zip(kinds, halves, strict=True)}
        if not at.endswith(".experts"):
            split[name] = tensor
    return split


def test_ranks_and_stages_take_their_experts(m) -> None:
    """From a matrix for each expert, in whatever order, under the names of a model with a vision tower."""
    config, tensors = m.toy("qwen3_5_moe")
    split = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in apart(tensors).items()}
    stages = ({"last_layer": 1, "with_head": False}, {"first_layer": 1, "with_embedding": False})

    def run(axis: Axis) -> dict[str, torch.nn.Parameter]:
        found = [m.build(config, dict(reversed(split.items())), axis, num_leaves=4, **stage) for stage in stages]
        return {name: p for stage in found for name, p in stage.named_parameters()}

    for size in (1, 2, 4):
        for rank, found in enumerate(run_ranks(size, run)):
            assert found.keys() == tensors.keys()
            for name, p in found.items():
                m.assert_same_bits(p.detach(), p.shard.slice(tensors[name], rank))


UP = f"{EXPERTS}.3.up_proj.weight"
SPOILT = {
    "a missing expert": ({UP: None}, [f"missing {UP}"]),
    "two": (
        {UP: None, f"{EXPERTS}.7.down_proj.weight": None},
        [f"missing {UP}", f"missing {EXPERTS}.7.down_proj.weight"],
    ),
    "one too many": ({f"{EXPERTS}.8.up_proj.weight": torch.zeros(10, 40)}, [f"unexpected {EXPERTS}.8.up_proj.weight"]),
    "a shape": ({UP: torch.zeros(40, 10)}, [f"{UP} has shape (40, 10), the configuration gives (10, 40)"]),
    "a type": ({UP: torch.zeros(10, 40).bfloat16()}, [f"{UP} is torch.bfloat16", "torch.float32"]),
    "both forms": ({f"{EXPERTS}.down_proj": torch.zeros(8, 40, 10)}, [f"{EXPERTS}", "down_proj", "given twice"]),
    "all of them": (
        {f"{EXPERTS}.{expert}.down_proj.weight": None for expert in range(8)},
        [f"missing {EXPERTS}.down_proj of shape (8, 40, 10)"],
    ),
    "most of them": (
        {f"{EXPERTS}.{expert}.down_proj.weight": None for expert in range(1, 8)},
        [f"missing {EXPERTS}.1.down_proj.weight, {EXPERTS}.2", "and 4 more"],
    ),
}


@pytest.mark.parametrize("changes, words", SPOILT.values(), ids=SPOILT.keys())
def test_incomplete_experts_are_refused(m, changes, words) -> None:
    config, tensors = m.toy("qwen3_moe")
    given = {name: tensor for name, tensor in (apart(tensors) | changes).items() if tensor is not None}
    with pytest.raises(LoadError) as error:
        m.build(config, given)
    assert all(word in str(error.value) for word in words), error.value


def test_a_repeated_piece_is_refused(m) -> None:
    config, tensors = m.toy("qwen3_moe")
    with pytest.raises(LoadError, match="experts.3.up_proj.weight was given twice"):
        m.build(config, [(UP, apart(tensors)[UP]), *apart(tensors).items()])


# As published with Qwen3-30B-A3B.
PUBLISHED = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
HYBRID = Qwen3_5MoeTextConfig().to_dict() | {"architectures": ["Qwen3_5MoeForCausalLM"], "dtype": "bfloat16"}


def test_a_published_configuration() -> None:
    assert from_hf(PUBLISHED) == DecoderConfig(
        family="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=None,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        max_position=40960,
        qk_norm=True,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        router_scoring="softmax",
        router_renormalise=True,
        dtype="bfloat16",
    )


def test_a_hybrid_alone_and_with_a_vision_tower() -> None:
    """The constants of transformers' class, which are those of Qwen3.5-35B-A3B."""
    config = from_hf(HYBRID)
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (256, 8, 512)
    assert (config.shared_expert_intermediate_size, config.shared_expert_gate) == (512, True)
    assert config.hybrid and config.attention_gate and config.zero_centred_norm and config.router_renormalise
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    text = {name: value for name, value in HYBRID.items() if name != "architectures"}
    whole |= {"text_config": text, "vision_config": {"depth": 27}, "image_token_id": 248056}
    alone = lookup("qwen3_5_moe").to_hf(whole)
    assert from_hf(whole) == from_hf(alone) == config
    assert (alone["architectures"], alone["model_type"]) == (["Qwen3_5MoeForCausalLM"], "qwen3_5_moe_text")


@pytest.mark.parametrize(
    "raw, config_class, model_class, count",
    [(PUBLISHED, Qwen3MoeConfig, Qwen3MoeForCausalLM, 531), (HYBRID, Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, 693)],
    ids=["qwen3_moe", "qwen3_5_moe"],
)
def test_names_and_shapes_are_those_of_transformers(raw, config_class, model_class, count) -> None:
    with torch.device("meta"):
        theirs = model_class(config_class(**raw))
    shapes = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert checkpoint.layout(from_hf(raw)) == shapes and len(shapes) == count


def test_spellings_of_the_number_of_experts() -> None:
    renamed = {name: value for name, value in PUBLISHED.items() if name != "num_experts"} | {"num_local_experts": 128}
    assert from_hf(renamed) == from_hf(PUBLISHED) == from_hf(PUBLISHED | {"num_local_experts": 128})
    theirs = Qwen3MoeConfig(**PUBLISHED).to_dict()
    assert "num_experts" not in theirs
    assert from_hf(theirs | {"architectures": ["Qwen3MoeForCausalLM"]}) == from_hf(PUBLISHED)


def test_which_layers_are_dense() -> None:
    def first(**fields: object) -> tuple[int, int | None]:
        config = from_hf(PUBLISHED | {"num_hidden_layers": 4} | fields)
        return config.first_dense_layers, config.intermediate_size

    assert first() == first(mlp_only_layers=None, decoder_sparse_step=None) == (0, None)
    assert first(mlp_only_layers=[1, 0]) == (2, 6144)
    assert first(num_hidden_layers=3, decoder_sparse_step=3) == (2, 6144)
    assert first(mlp_only_layers=[0, 1, 2], decoder_sparse_step=2) == (3, 6144)


WHOLE = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
REFUSED = {
    "output_router_logits": (PUBLISHED | {"output_router_logits": True}, "True", "False"),
    "mlp_only_layers": (PUBLISHED | {"mlp_only_layers": [0, 2]}, "[0, 2]", "before all others"),
    "decoder_sparse_step": (PUBLISHED | {"decoder_sparse_step": 2}, "2", "before all others"),
    "num_local_experts": (PUBLISHED | {"num_local_experts": 64}, "64", "128"),
    "num_experts": (PUBLISHED | {"num_experts": None}, "missing", "no default"),
    "norm_topk_prob": (PUBLISHED | {"norm_topk_prob": None}, "missing", "no default"),
    "num_key_value_heads": (PUBLISHED | {"num_key_value_heads": None}, "missing", "no default"),
    "n_group": (PUBLISHED | {"n_group": 8}, "8", "its absence"),
    "shared_expert_intermediate_size": (PUBLISHED | {"shared_expert_intermediate_size": 8}, "8", "its absence"),
    "full_attention_interval": (HYBRID | {"layer_types": None}, "qwen3_5_moe", "missing"),
    "text_config": (WHOLE, "None", "'qwen3_5_moe_text'"),
    "text_config.model_type": (WHOLE | {"text_config": {"model_type": "qwen3_5_text"}}, "'qwen3_5_text'", "_moe_text'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_family_refuses(name) -> None:
    raw, *words = REFUSED[name]
    with pytest.raises(Unsupported) as error:
        from_hf(raw)
    assert all(word in str(error.value) for word in (f"field {name} ", *words)), error.value


INVALID = {
    "no experts": ("qwen3", {"router_scale": 2.0}, ["router_scale = 2.0", "no experts"]),
    "no shared expert": ("qwen3_moe", {"shared_expert_gate": True}, ["shared_expert_gate = True", "no shared expert"]),
    "dense without a width": ("qwen3", {"intermediate_size": None}, ["intermediate_size = None"]),
    "dense first without a width": ("qwen3_moe", {"first_dense_layers": 1}, ["intermediate_size = None"]),
    "a width for nobody": (
        "qwen3_moe",
        {"intermediate_size": 28},
        ["intermediate_size = 28", "every layer has experts"],
    ),
    "all dense": ("qwen3_moe", {"first_dense_layers": 2, "intermediate_size": 4}, ["layers = 2", "num_layers = 2"]),
    "too many chosen": ("qwen3_moe", {"num_experts_per_tok": 9}, ["num_experts_per_tok = 9", "8 experts"]),
    "no width": ("qwen3_moe", {"moe_intermediate_size": None}, ["moe_intermediate_size = None"]),
    "no shared width": ("qwen3_moe", {"shared_expert_intermediate_size": 0}, ["shared_expert_intermediate_size = 0"]),
    "a scoring": ("qwen3_moe", {"router_scoring": "top"}, ["router_scoring = 'top'", "softmax"]),
    "a scale": ("qwen3_moe", {"router_scale": 1}, ["router_scale = 1 ", "float"]),
    "groups": ("qwen3_moe", {"router_groups": 3}, ["router_groups = 3", "num_experts = 8"]),
    "groups kept": ("qwen3_moe", {"router_groups_kept": 2}, ["router_groups = 1", "router_groups_kept = 2"]),
    "a switch": ("qwen3_moe", {"router_renormalise": 1}, ["router_renormalise = 1", "true or false"]),
}


@pytest.mark.parametrize("family, changes, words", INVALID.values(), ids=INVALID.keys())
def test_what_a_configuration_refuses(m, family, changes, words) -> None:
    with pytest.raises(ValueError) as error:
        m.toy(family, **changes)
    assert all(word in str(error.value) for word in words), error.value


def test_a_rule_that_does_not_hold_together_is_refused(m) -> None:
    config, _ = m.toy("qwen3_moe")
    config = dataclasses.replace(config, router_scoring="sigmoid")
    with pytest.raises(ValueError, match=r"eps = 0.0 with scoring = 'sigmoid'"):
        Decoder(config, None, SingleAxis(), m.build(*m.toy()).schedule, device="meta")
