"""Tiny decoders with the real CPU kernels, and transformers' own classes to compare them with."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

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
}
SEQUENCES = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [35], [8, 9, 7], list(range(20)))
"""Ragged: one token, odd lengths, one sequence longer than a key/value block."""


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


def make_hf(family: str, **fields: object) -> tuple[dict[str, object], torch.nn.Module]:
    """(configuration as on disk, transformers' model) with every parameter random, norms and biases included."""
    config_class, model_class = HF["qwen2" if family == "mimo" else family]
    sizes = {"vocab_size": 37, "hidden_size": 40, "intermediate_size": 28, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 64}
    hf_config = config_class(**(sizes | fields), attn_implementation="eager", pad_token_id=None)
    torch.manual_seed(11)
    model = model_class(hf_config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.2)
            if "norm" in name:
                p.add_(1.0)
    raw = hf_config.to_dict() | {"architectures": [model_class.__name__], "dtype": "float32"}
    if family == "mimo":
        raw |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    return raw, model


def hf_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """State of transformers' model under checkpoint names, a tied head not repeated."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


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
    **stage: object,
) -> Decoder:
    """A loaded decoder."""
    schedule = Schedule(num_leaves=num_leaves)
    decoder = Decoder(config, load_kernels(impl, schedule), axis or SingleAxis(), schedule, **stage)
    checkpoint.load(decoder, tensors)
    return decoder


def packed_attend(decoder: Decoder, cu_seqlens: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The trainer's attention over packed rows."""
    return lambda layer, q, k, v: decoder.kernels.attention(q, k, v, cu_seqlens, decoder.config.scale)


def forward(decoder: Decoder, sequences: list[list[int]] = SEQUENCES) -> torch.Tensor:
    """Full logits of packed sequences."""
    ids, positions, cu_seqlens = pack(sequences)
    x = decoder.layers(decoder.embed(ids), positions, packed_attend(decoder, cu_seqlens))
    return decoder.full_logits(x)


def loss_of(logits: torch.Tensor, sequences: list[list[int]] = SEQUENCES) -> torch.Tensor:
    """A loss that reaches every logit: mean negative log-probability of the next id, wrapping around."""
    ids, _, _ = pack(sequences)
    return torch.nn.functional.cross_entropy(logits, ids.roll(-1))


def toy(family: str = "qwen3", **changes: object) -> tuple[DecoderConfig, dict[str, torch.Tensor]]:
    """(config, full tensors) of a model that 4 leaves and tensor-parallel size 4 cut evenly."""
    bias = family in ("qwen2", "mimo")
    config = DecoderConfig(
        family=family,
        vocab_size=36,
        hidden_size=40,
        intermediate_size=28,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=6,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position=64,
        qkv_bias=bias,
        qk_norm=family == "qwen3",
    )
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
    shared = (make_hf, hf_tensors, pack, build, packed_attend, forward, loss_of, toy, assert_same_bits)
    return SimpleNamespace(SEQUENCES=SEQUENCES, from_hf=families.from_hf, **{f.__name__: f for f in shared})
