"""Tiny decoders with the real CPU kernels, and transformers' own classes to compare them with."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from skyrl_isoexec.kernels.bundle import load_kernels
from skyrl_isoexec.model import checkpoint, families
from skyrl_isoexec.model.axes import Axis, SingleAxis
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.schedule.schedule import Schedule

HF = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
}
HYBRID_HF = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-2,  # so that a row of almost nothing is not blown up, and its rounding with it
    "full_attention_interval": 2,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
HYBRID = {
    "rotary_dim": 4,
    "attention_gate": True,
    "zero_centred_norm": True,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
EXPERTS_HF = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT_HF = {
    "num_hidden_layers": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
}
LATENT = {
    "num_layers": 3,
    "num_kv_heads": 8,
    "head_dim": 10,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "rope_interleaved": True,
    "latent_norm_eps": 1e-5,
    "intermediate_size": 28,
    "first_dense_layers": 1,
    "router_scoring": "sigmoid",
    "router_bias": True,
    "router_scale": 1.8,
    "router_eps": 1e-20,
    "shared_expert_intermediate_size": 20,
}
EXPERTS = {
    "intermediate_size": None,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "router_scoring": "softmax",
    "router_renormalise": True,
}
SHARED = {"shared_expert_intermediate_size": 20, "shared_expert_gate": True}
CHUNK = 16
SEQUENCES = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [35], [8, 9, 7], list(range(20)))
"""Ragged: one token, odd lengths, one sequence longer than a key/value block and than a chunk."""
LONG = tuple([(7 * i + length) % 37 for i in range(length)] for length in (1, 5, 63, 64, 65, 130))
"""Around the 64 rows of a chunk, and one of two chunks and a bit."""


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


def learned(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of a checkpoint: parameters, and the biases of routers, which transformers has as buffers."""
    buffers = ((name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return [*model.named_parameters(), *buffers]


def make_hf(family: str, **fields: object) -> tuple[dict[str, object], torch.nn.Module]:
    """(configuration as on disk, transformers' model) with every parameter random, norms and biases included."""
    config_class, model_class = HF["qwen2" if family == "mimo" else family]
    sizes = {"vocab_size": 37, "hidden_size": 40, "intermediate_size": 28, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 64}
    sizes |= HYBRID_HF if family.startswith("qwen3_5") else {}
    sizes |= EXPERTS_HF if family.endswith("_moe") else {}
    sizes |= LATENT_HF if family == "glm4_moe_lite" else {}
    eager = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if "_moe" in family else {})
    hf_config = config_class(**(sizes | fields), **eager, pad_token_id=None)
    torch.manual_seed(11)
    model = model_class(hf_config).float().eval()
    with torch.no_grad():
        for name, p in learned(model):
            p.normal_(std=0.2)
            if name.endswith("A_log"):
                p.add_(torch.linspace(-5.0, 0.0, len(p)))  # from almost no decay to a strong one
            elif name.endswith("conv1d.weight"):
                p[..., -1].add_(1.0)  # rows well away from zero, which is divided by their length
            elif "norm" in name:
                p.add_(1.0)
    raw = hf_config.to_dict() | {"architectures": [model_class.__name__], "dtype": "float32"}
    if family == "mimo":
        raw |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    return raw, model


def hf_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """State of transformers' model under checkpoint names, a tied head not repeated."""
    return {name: p.detach().clone() for name, p in learned(model)}


def pack(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids_T, positions_T, cu_seqlens) of sequences laid end to end."""
    ids = torch.tensor([token for s in sequences for token in s])
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    lengths = torch.tensor([0] + [len(s) for s in sequences])
    return ids, positions, lengths.cumsum(0).to(torch.int32)


def build(
    config: DecoderConfig,
    tensors: dict[str, torch.Tensor],
    axis: Axis | None = None,
    *,
    num_leaves: int = 1,
    impl: str = "cpu",
    gdn_chunk: int = CHUNK,
    **stage: object,
) -> Decoder:
    """A loaded decoder."""
    schedule = Schedule(num_leaves=num_leaves, gdn_chunk=gdn_chunk)
    decoder = Decoder(config, load_kernels(impl, schedule), axis or SingleAxis(), schedule, **stage)
    checkpoint.load(decoder, tensors)
    return decoder


def forward(decoder: Decoder, sequences: list[list[int]] = SEQUENCES) -> torch.Tensor:
    """Full logits of packed sequences."""
    ids, positions, cu_seqlens = pack(sequences)
    x = decoder.layers(decoder.embed(ids), positions, decoder.end_to_end(cu_seqlens))
    return decoder.full_logits(x)


def loss_of(logits: torch.Tensor, sequences: list[list[int]] = SEQUENCES) -> torch.Tensor:
    """A loss that reaches every logit: mean negative log-probability of the next id, wrapping around."""
    ids, _, _ = pack(sequences)
    return torch.nn.functional.cross_entropy(logits, ids.roll(-1))


def toy(family: str = "qwen3", **changes: object) -> tuple[DecoderConfig, dict[str, torch.Tensor]]:
    """(config, full tensors) of a model that 4 leaves and tensor-parallel size 4 cut evenly."""
    bias = family in ("qwen2", "mimo")
    hybrid, experts, latent = family.startswith("qwen3_5"), "_moe" in family, family == "glm4_moe_lite"
    fields = {
        "vocab_size": 36,
        "hidden_size": 40,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position": 64,
        "qkv_bias": bias,
        "qk_norm": family.startswith("qwen3"),
        **(EXPERTS if experts else {"intermediate_size": 28}),
        **(HYBRID if hybrid else {}),
        **(SHARED if hybrid and experts else {}),
        **(LATENT if latent else {}),
    }
    config = DecoderConfig(family=family, **fields)
    config = dataclasses.replace(config, **changes)
    tensors = dict(checkpoint.random_tensors(config, 5, std=0.2))
    generator = torch.Generator().manual_seed(6)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            tensors[name] = (tensor.float() + 0.2 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
    return config, tensors


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal dtype, shape and bit pattern, and something to compare."""
    assert a.dtype == b.dtype and a.shape == b.shape and a.numel()
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    differing = (a.contiguous().view(kind) != b.contiguous().view(kind)).sum().item()
    assert differing == 0, f"{differing} of {a.numel()} elements differ"


@pytest.fixture(scope="session")
def m() -> SimpleNamespace:
    """What the tests of this folder share."""
    shared = (make_hf, hf_tensors, learned, pack, build, forward, loss_of, toy, assert_same_bits)
    return SimpleNamespace(SEQUENCES=SEQUENCES, LONG=LONG, from_hf=families.from_hf, **{f.__name__: f for f in shared})
