"""Frozen description of a decoder, independent of any host and of torch.

A `DecoderConfig` is what both runtimes build their copy of the model from; `families/` makes one from a Hugging Face
configuration. Everything here changes the function the model computes, so it belongs to the contract's identities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

DTYPES = ("float32", "bfloat16")
OPERATORS = ("embedding", "linear", "logprob", "rmsnorm", "rope", "row_linear", "swiglu")
"""Those of every model, beside the one that mixes positions."""
ROUTER_SCORINGS = ("sigmoid", "softmax")
SWITCHES = (
    "qkv_bias",
    "o_bias",
    "qk_norm",
    "tied_head",
    "attention_gate",
    "zero_centred_norm",
    "shared_expert_gate",
    "router_renormalise",
    "router_bias",
    "rope_interleaved",
)
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
)
GDN_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_FIELDS = (*LATENT_SIZES, "q_lora_rank", "rope_interleaved", "latent_norm_eps")
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "router_groups", "router_groups_kept")
EXPERT_FIELDS = (
    *EXPERT_SIZES,
    "shared_expert_intermediate_size",
    "shared_expert_gate",
    "router_scoring",
    "router_bias",
    "router_renormalise",
    "router_scale",
    "router_eps",
    "first_dense_layers",
)
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and constants of a decoder-only transformer with SwiGLU MLPs.

    A layer mixes positions by grouped-query attention, by multi-head latent attention or, in a hybrid, by a gated delta
    rule. Its MLP is dense or a mixture of experts.
    """

    family: str
    """Name of the module under `families/` that made this configuration."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    """Inner width of the dense MLPs; None where no layer has one."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of one head's query and key; free of `hidden_size`, and even where all of it is rotated."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, float] | None = None
    """None for plain rotary angles, or the four constants of the llama3 rule (`LLAMA3_KEYS`)."""
    max_position: int
    """Number of positions the rotary table covers."""
    qkv_bias: bool = False
    """On queries, keys and values; of latent attention, on what projects down to the latents."""
    o_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation."""
    rotary_dim: int | None = None
    """Leading entries of a head that are rotated; None for all of them."""
    attention_gate: bool = False
    """A sigmoid gate, projected beside the query, multiplies the output of the attention."""
    zero_centred_norm: bool = False
    """Weights of norms are kept as differences from 1."""
    kv_lora_rank: int | None = None
    """Width of the latent of latent attention; None without one, and then the six below are as they are here."""
    q_lora_rank: int | None = None
    """Width that queries are projected down to; None for one projection."""
    qk_nope_head_dim: int | None = None
    """Entries of a head's query and key that are not rotated, before those that are."""
    qk_rope_head_dim: int | None = None
    """Rotated entries, in keys the same for all heads."""
    v_head_dim: int | None = None
    """Width of one head's value."""
    rope_interleaved: bool = False
    """Neighbouring entries are rotated together, not those at one place of either half."""
    latent_norm_eps: float | None = None
    """As `rms_norm_eps`, of the norms of the latents."""
    full_attention_interval: int = 1
    """Layer i attends where (i + 1) is a multiple of it; the others are gated delta rules. 1 for attention alone."""
    linear_num_key_heads: int | None = None
    """Of a gated delta rule, as the four below; None where no layer is one."""
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = None
    """Taps of the causal convolution before it."""
    num_experts: int | None = None
    """Experts of a layer; None where every MLP is dense, and then the eleven below are as they are here."""
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    """Inner width of an expert."""
    shared_expert_intermediate_size: int | None = None
    """Inner width of an expert that every token has; None where there is none."""
    shared_expert_gate: bool = False
    """A sigmoid of one number per token multiplies its output."""
    router_scoring: str | None = None
    """This and the five after the next: the fields of a RouterRule (kernels/numeric/router_rule.py)."""
    router_bias: bool = False
    """A number for each expert is added to the scores that choose; fp32, and without a gradient."""
    router_renormalise: bool = False
    router_scale: float = 1.0
    router_groups: int = 1
    router_groups_kept: int = 1
    router_eps: float = 0.0
    first_dense_layers: int = 0
    """Layers before this one have a dense MLP."""
    tied_head: bool = False
    """The output head is the embedding matrix."""
    dtype: str = "float32"
    """Type of weights and residual stream, one of `DTYPES`."""

    def __post_init__(self) -> None:
        sizes = (
            *SIZES,
            "full_attention_interval",
            *(GDN_SIZES if self.hybrid else ()),
            *(LATENT_SIZES if self.latent else ()),
            *(EXPERT_SIZES if self.has_experts else ()),
            *(("intermediate_size",) if self.has_dense_mlp else ()),
        )
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"DecoderConfig.{name} = {value!r} must be a positive integer")
        for name in ("rms_norm_eps", "rope_theta", *(("latent_norm_eps",) if self.latent else ())):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ValueError(f"DecoderConfig.{name} = {value!r} must be a positive finite number")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"DecoderConfig.{name} = {getattr(self, name)!r} must be true or false")
        if self.head_dim % 2 and not self.latent:
            raise ValueError(f"DecoderConfig.head_dim = {self.head_dim} must be even: the rotation pairs its halves")
        self._check_latent()
        rotated = 2 if self.rotary_dim is None else self.rotary_dim
        if type(rotated) is not int or not 0 < rotated <= self.head_dim or rotated % 2:
            raise ValueError(f"DecoderConfig.rotary_dim = {rotated!r} must be even, up to head_dim = {self.head_dim}")
        given = [name for name in GDN_SIZES if getattr(self, name) is not None]
        if given and not self.hybrid:
            raise ValueError(f"DecoderConfig.{given[0]} = {getattr(self, given[0])!r}, but every layer attends")
        if self.hybrid and self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"DecoderConfig.linear_num_value_heads = {self.linear_num_value_heads} must be a multiple of "
                f"linear_num_key_heads = {self.linear_num_key_heads}"
            )
        self._check_experts()
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

    def _check_latent(self) -> None:
        if not self.latent:
            for name in LATENT_FIELDS:
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    raise ValueError(f"DecoderConfig.{name} = {getattr(self, name)!r}, but no attention is latent")
            return
        rank = self.q_lora_rank
        if rank is not None and (type(rank) is not int or rank < 1):
            raise ValueError(f"DecoderConfig.q_lora_rank = {rank!r} must be a positive integer, or None")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"DecoderConfig.qk_rope_head_dim = {self.qk_rope_head_dim} must be even: it is pairs")
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        for name, value in (("head_dim", width), ("num_kv_heads", self.num_heads)):
            if getattr(self, name) != value:
                raise ValueError(f"DecoderConfig.{name} = {getattr(self, name)} must be {value} with latent attention")
        for name in ("rotary_dim", "qk_norm", "attention_gate", "zero_centred_norm", "full_attention_interval"):
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise ValueError(f"DecoderConfig.{name} = {getattr(self, name)!r} is not defined for latent attention")
        if not self.has_experts:
            raise ValueError(
                "DecoderConfig.num_experts = None: latent attention is proved with experts alone; give some"
            )

    def _check_experts(self) -> None:
        if not self.has_experts:
            for name in EXPERT_FIELDS:
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    raise ValueError(f"DecoderConfig.{name} = {getattr(self, name)!r}, but there are no experts")
            return
        first = self.first_dense_layers
        if type(first) is not int or not 0 <= first < self.num_layers:
            raise ValueError(
                f"DecoderConfig.first_dense_layers = {first!r} must be from 0, less than num_layers = {self.num_layers}"
            )
        if not self.has_dense_mlp and self.intermediate_size is not None:
            raise ValueError(
                f"DecoderConfig.intermediate_size = {self.intermediate_size!r}, but every layer has experts; leave None"
            )
        shared = self.shared_expert_intermediate_size
        if shared is not None and (type(shared) is not int or shared < 1):
            raise ValueError(
                f"DecoderConfig.shared_expert_intermediate_size = {shared!r} must be a positive integer, or None"
            )
        if self.shared_expert_gate and shared is None:
            raise ValueError("DecoderConfig.shared_expert_gate = True, but there is no shared expert")
        if self.router_scoring not in ROUTER_SCORINGS:
            raise ValueError(f"DecoderConfig.router_scoring = {self.router_scoring!r} is none of {ROUTER_SCORINGS}")
        for name in ("router_scale", "router_eps"):
            if type(getattr(self, name)) is not float:
                raise ValueError(f"DecoderConfig.{name} = {getattr(self, name)!r} must be a float")
        width, rest = divmod(self.num_experts, self.router_groups)
        if rest or self.router_groups_kept > self.router_groups:
            raise ValueError(
                f"DecoderConfig.router_groups = {self.router_groups} must divide num_experts = {self.num_experts} and "
                f"be at least router_groups_kept = {self.router_groups_kept}"
            )
        if self.num_experts_per_tok > width * self.router_groups_kept:
            raise ValueError(
                f"DecoderConfig.num_experts_per_tok = {self.num_experts_per_tok} is more than the "
                f"{width * self.router_groups_kept} experts that may be chosen"
            )

    @property
    def has_experts(self) -> bool:
        """Whether some layers have experts in the place of a dense MLP."""
        return self.num_experts is not None

    @property
    def has_dense_mlp(self) -> bool:
        """Whether some layers have a dense MLP."""
        return not self.has_experts or self.first_dense_layers != 0

    def mixes_experts(self, layer: int) -> bool:
        """Whether a layer, numbered over the whole model, has experts."""
        return self.has_experts and layer >= self.first_dense_layers

    @property
    def latent(self) -> bool:
        """Whether layers attend through a latent that all heads share."""
        return self.kv_lora_rank is not None

    @property
    def latent_width(self) -> int:
        """Entries of a position's key in latent attention: the latent and the rotated part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def hybrid(self) -> bool:
        """Whether some layers are gated delta rules."""
        return self.full_attention_interval != 1

    def attends(self, layer: int) -> bool:
        """Whether a layer, numbered over the whole model, is attention."""
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators that it computes with, by the names of kernels' folders; one may be in another form."""
        mixers = ("mla",) if self.latent else ("attention", "gdn") if self.hybrid else ("attention",)
        return tuple(sorted((*OPERATORS, *mixers, *(("combine", "experts", "router") if self.has_experts else ()))))

    @property
    def scale(self) -> float:
        """Factor on attention scores: head_dim ** -0.5."""
        return self.head_dim**-0.5

    def to_dict(self) -> dict[str, object]:
        """Plain data, for a contract or a record."""
        return dataclasses.asdict(dataclasses.replace(self, rope_scaling=dict(self.rope_scaling or {}) or None))


def check_partition(config: DecoderConfig, *, num_leaves: int, tp: int, ep: int | None = None) -> None:
    """Refuse a schedule or parallel degree that does not cut this model evenly; names both values.

    Each rank must own whole leaves of every sum that is a tree (row-parallel linears, the softmax over the
    vocabulary), whole key/value heads, and whole experts: of the expert-parallel degree, or, if that is None, of tp.
    The latents of latent attention are whole on every rank.
    """
    if num_leaves < 1 or num_leaves & (num_leaves - 1):
        raise ValueError(f"schedule.num_leaves = {num_leaves} must be a power of two")
    if tp < 1 or tp & (tp - 1) or tp > num_leaves:
        raise ValueError(
            f"tensor-parallel size {tp} must be a power of two, at most schedule.num_leaves = {num_leaves}"
        )
    heads = ("linear_num_key_heads", "linear_num_value_heads") if config.hybrid else ()
    experts = ("num_experts",) if config.has_experts and ep is None else ()
    if ep is not None and ep > 1 and not config.has_experts:
        raise ValueError(f"expert-parallel size {ep}, but every layer of this model is dense; it must be 1")
    if ep is not None and config.has_experts and (ep < 1 or config.num_experts % ep):
        raise ValueError(f"num_experts = {config.num_experts} is not divisible by expert-parallel size {ep}")
    for name in ("num_heads", "num_kv_heads", *heads, *experts, "vocab_size"):
        if getattr(config, name) % tp:
            raise ValueError(f"{name} = {getattr(config, name)} is not divisible by tensor-parallel size {tp}")
    outputs = "v_head_dim" if config.latent else "head_dim"
    sums = {f"num_heads * {outputs}": config.num_heads * getattr(config, outputs), "vocab_size": config.vocab_size}
    widths = {name: getattr(config, name) for name in ("intermediate_size", "shared_expert_intermediate_size")}
    sums |= {name: width for name, width in widths.items() if width is not None}
    if config.hybrid:
        value = config.linear_num_value_heads * config.linear_value_head_dim
        sums["linear_num_value_heads * linear_value_head_dim"] = value
    for name, value in sums.items():
        if value % num_leaves:
            raise ValueError(f"{name} = {value} is not divisible by schedule.num_leaves = {num_leaves}")
