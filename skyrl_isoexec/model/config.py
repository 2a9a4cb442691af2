"""Frozen description of a dense decoder, independent of any host and of torch.

A `DecoderConfig` is what both runtimes build their copy of the model from; `families/` makes one from a Hugging Face
configuration. Everything here changes the function the model computes, so it belongs to the contract's identities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

DTYPES = ("float32", "bfloat16")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
)
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and constants of a decoder-only transformer with grouped-query attention and a SwiGLU MLP."""

    family: str
    """Name of the module under `families/` that made this configuration."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of one attention head; even, and free of `hidden_size`."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, float] | None = None
    """None for plain rotary angles, or the four constants of the llama3 rule (`LLAMA3_KEYS`)."""
    max_position: int
    """Number of positions the rotary table covers."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation."""
    tied_head: bool = False
    """The output head is the embedding matrix."""
    dtype: str = "float32"
    """Type of weights and residual stream, one of `DTYPES`."""

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"DecoderConfig.{name} = {value!r} must be a positive integer")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ValueError(f"DecoderConfig.{name} = {value!r} must be a positive finite number")
        for name in ("qkv_bias", "o_bias", "qk_norm", "tied_head"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"DecoderConfig.{name} = {getattr(self, name)!r} must be true or false")
        if self.head_dim % 2:
            raise ValueError(f"DecoderConfig.head_dim = {self.head_dim} must be even: the rotation pairs its halves")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"DecoderConfig.num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"DecoderConfig.dtype = {self.dtype!r} is not supported; supported: {', '.join(DTYPES)}")
        if self.rope_scaling is not None and set(self.rope_scaling) != set(LLAMA3_KEYS):
            raise ValueError(
                f"DecoderConfig.rope_scaling has keys {sorted(self.rope_scaling)}; expected {sorted(LLAMA3_KEYS)}"
            )

    @property
    def scale(self) -> float:
        """Factor on attention scores: head_dim ** -0.5."""
        return self.head_dim**-0.5

    def to_dict(self) -> dict[str, object]:
        """Plain data, for a contract or a record."""
        return dataclasses.asdict(dataclasses.replace(self, rope_scaling=dict(self.rope_scaling or {}) or None))


def check_partition(config: DecoderConfig, *, num_leaves: int, tp: int) -> None:
    """Refuse a schedule or tensor-parallel degree that does not cut this model evenly; names both values.

    Each rank must own whole leaves of every sum that is a tree (row-parallel linears, the softmax over the
    vocabulary), and whole key/value heads.
    """
    if num_leaves < 1 or num_leaves & (num_leaves - 1):
        raise ValueError(f"schedule.num_leaves = {num_leaves} must be a power of two")
    if tp < 1 or tp & (tp - 1) or tp > num_leaves:
        raise ValueError(
            f"tensor-parallel size {tp} must be a power of two, at most schedule.num_leaves = {num_leaves}"
        )
    for name in ("num_heads", "num_kv_heads", "vocab_size"):
        if getattr(config, name) % tp:
            raise ValueError(f"{name} = {getattr(config, name)} is not divisible by tensor-parallel size {tp}")
    sums = {
        "intermediate_size": config.intermediate_size,
        "num_heads * head_dim": config.num_heads * config.head_dim,
        "vocab_size": config.vocab_size,
    }
    for name, value in sums.items():
        if value % num_leaves:
            raise ValueError(f"{name} = {value} is not divisible by schedule.num_leaves = {num_leaves}")
