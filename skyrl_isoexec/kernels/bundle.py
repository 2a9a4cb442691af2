"""All operators of one implementation, chosen by name: what a model computes with.

What must stay equal: both sides of a run load the same name with the same schedule. No name is a fallback for another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from skyrl_isoexec.schedule import Schedule

IMPLEMENTATIONS = {"cpu": "cpu", "reference": "reference"}
"""Name of an implementation -> name of its file in every operator's folder."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One implementation's operators. Those marked * record a graph where gradients are wanted."""

    impl: str
    """The name that was asked for."""
    schedule: Schedule
    """The order of arithmetic that is bound into the operators which need one."""
    linear: Callable
    """* linear(x_TK, w_NK, bias_N=None, out_dtype=None, packed=None) -> y_TN."""
    pack: Callable
    """pack(w_NK, out=None) -> packed, a layout derived from a weight, for `linear` and `row_linear`."""
    row_linear: Callable
    """* row_linear(x_TK, w_NK, num_leaves, packed=None) -> fp32 root_TN."""
    tree_sum: Callable
    """* tree_sum(parts_GTN fp32) -> fp32 TN."""
    rmsnorm: Callable
    """* rmsnorm(x_TH, w_H, eps) -> y_TH."""
    add_rmsnorm: Callable
    """* add_rmsnorm(x_TH, residual_TH, w_H, eps) -> (y_TH, new_residual_TH)."""
    rope: Callable
    """* rope(x_TND, positions_T int64, cos_sin_PD fp32) -> y_TND."""
    silu_mul: Callable
    """* silu_mul(gate_TF, up_TF) -> y_TF."""
    embedding: Callable
    """* embedding(ids_T, w_VH) -> x_TH."""
    attention: Callable
    """* attention(q_TND, k_TKD, v_TKD, cu_seqlens, scale) -> y_TND."""
    kv_cache_shape: Callable
    """kv_cache_shape(num_pages, page_size, num_kv_heads, head_dim) -> shape of one layer's cache."""
    write_kv: Callable
    """write_kv(k_TKD, v_TKD, cache, slots_T)."""
    attention_paged: Callable
    """attention_paged(q_TND, cache, block_table, query_start, seq_lens, scale, out=None) -> y_TND."""
    logprobs: Callable
    """logprobs(logits_TV, temperature=1.0) -> fp32 TV."""
    token_logprobs: Callable
    """* token_logprobs(logits_TV, ids_T, temperature=1.0) -> fp32 T."""
    row_max: Callable
    """row_max(logits_TV) -> T: a rank's part of the maximum."""
    leaf_sums: Callable
    """leaf_sums(logits_TV, row_max_T, local_leaves) -> [leaves, T]: a rank's part of the sum."""
    total: Callable
    """total(sums_LT) -> T: the balanced tree over the leaves of all ranks."""
    finish: Callable
    """finish(logits, row_max_T, total_T) -> log-probabilities from the parts of all ranks."""
    grad_logits: Callable
    """grad_logits(grad_T, logits_TV, ids_T, row_max_T, total_T, first_id=0) -> TV: a rank's part of the gradient."""


def load_kernels(impl: str, schedule: Schedule) -> Kernels:
    """The operators of implementation `impl`, bound to `schedule`; ValueError for a name that is not known."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"kernels: no implementation {impl!r}; known are {sorted(IMPLEMENTATIONS)}")

    def op(name: str, file: str = IMPLEMENTATIONS[impl]) -> object:
        return import_module(f"skyrl_isoexec.kernels.{name}.{file}")

    linear, row_linear, rmsnorm = op("linear"), op("row_linear"), op("rmsnorm")
    attention, logprob = op("attention"), op("logprob")
    return Kernels(
        impl=impl,
        schedule=schedule,
        linear=linear.linear,
        pack=linear.pack,
        row_linear=row_linear.row_linear,
        tree_sum=row_linear.tree_sum,
        rmsnorm=rmsnorm.rmsnorm,
        add_rmsnorm=rmsnorm.add_rmsnorm,
        rope=op("rope").rope,
        silu_mul=op("swiglu").silu_mul,
        embedding=op("embedding").embedding,
        attention=partial(attention.attention, schedule=schedule),
        kv_cache_shape=partial(op("attention", "spec").kv_cache_shape, schedule=schedule),
        write_kv=attention.write_kv,
        attention_paged=partial(attention.attention_paged, schedule=schedule),
        logprobs=partial(logprob.logprobs, num_leaves=schedule.num_leaves),
        token_logprobs=partial(logprob.token_logprobs, num_leaves=schedule.num_leaves),
        row_max=logprob.row_max,
        leaf_sums=logprob.leaf_sums,
        total=logprob.total,
        finish=logprob.finish,
        grad_logits=logprob.grad_logits,
    )
