"""The operators of a model, each from a named implementation: what a model computes with, and what it has computed.

What must stay equal: both sides of a run load the same names with the same schedule. No name is a fallback for another;
an operator that was not chosen refuses to be called.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from functools import partial, update_wrapper
from importlib import import_module
from pathlib import Path

from skyrl_isoexec.schedule import Schedule

OPS = (
    "attention",
    "combine",
    "embedding",
    "experts",
    "gdn",
    "gdn_cpr",
    "linear",
    "logprob",
    "mla",
    "rmsnorm",
    "rope",
    "router",
    "row_linear",
    "swiglu",
)
"""The operators, by the name of their folder."""
FORMS = {"gdn_cpr": "gdn"}
"""Operator -> the one whose functions it has in another order of arithmetic; a model computes with one of them."""
IMPLEMENTATIONS = ("cpu", "kernel", "reference")
"""Files that an operator's folder has one implementation in: compiled for the CPU, for Hopper (Triton), and eager."""
FIELD_OP = {
    "linear": "linear",
    "pack": "linear",
    "row_linear": "row_linear",
    "tree_sum": "row_linear",
    "rmsnorm": "rmsnorm",
    "add_rmsnorm": "rmsnorm",
    "gated_rmsnorm": "rmsnorm",
    "rope": "rope",
    "silu_mul": "swiglu",
    "sigmoid_mul": "swiglu",
    "embedding": "embedding",
    "attention": "attention",
    "kv_cache_shape": "attention",
    "write_kv": "attention",
    "attention_paged": "attention",
    "mla": "mla",
    "head_linear": "mla",
    "mla_cache_shape": "mla",
    "write_latent": "mla",
    "mla_paged": "mla",
    "route": "router",
    "combine": "combine",
    "dispatch": "combine",
    "expand": "combine",
    "grouped_linear": "experts",
    "gdn": "gdn",
    "gdn_states": "gdn",
    "gdn_paged": "gdn",
    "logprobs": "logprob",
    "token_logprobs": "logprob",
    "row_max": "logprob",
    "leaf_sums": "logprob",
    "total": "logprob",
    "finish": "logprob",
    "grad_logits": "logprob",
}
"""Function of `Kernels` -> its operator."""
MAIN = {op: name for name, op in reversed(FIELD_OP.items())}
MAIN |= {form: MAIN[op] for form, op in FORMS.items()}
"""Operator -> its main function: the first that `FIELD_OP` has for it."""
UNCOUNTED = ("pack", "kv_cache_shape", "write_kv", "mla_cache_shape", "write_latent", "grad_logits", "gdn_states")
"""Functions that give no forward value: their use is not recorded."""
SCHEDULED = ("attention", "attention_paged", "kv_cache_shape", "mla", "mla_paged", "gdn", "gdn_states", "gdn_paged")
"""Functions that are bound to the whole schedule; `LEAVED` ones to its number of leaves."""
LEAVED = ("logprobs", "token_logprobs")


class Tally:
    """Which operators have been called in which case."""

    __slots__ = ("case", "cases", "seen")

    def __init__(self) -> None:
        self.cases: dict[str, set[str]] = {}
        self.enter(None)

    def enter(self, case: str | None) -> None:
        """Count calls for `case` from now on; for None they are not counted."""
        self.case = case
        self.seen = set(OPS) if case is None else self.cases.setdefault(case, set())


def counted(function: Callable, op: str, tally: Tally) -> Callable:
    """`function`, which is `__wrapped__`, with its calls in `tally`: one test of a set per call."""

    def call(*arguments, **named):
        if op not in tally.seen:
            tally.seen.add(op)
        return function(*arguments, **named)

    update_wrapper(call, getattr(function, "func", function))
    call.__wrapped__ = function
    return call


@dataclass(kw_only=True, eq=False)
class Kernels:
    """Operators bound to a schedule. Those marked * record a graph where gradients are wanted.

    Nothing can be replaced but `case`, which a runtime sets before each forward: the name of the case that it computes,
    or None for what counts as none.
    """

    impls: Mapping[str, str]
    """Operator -> name of its implementation's file."""
    schedule: Schedule
    """The order of arithmetic that is bound into the operators which need one."""
    linear: Callable
    """* linear(x_TK, w_NK, bias_N=None, out_dtype=None, packed=None) -> y_TN."""
    pack: Callable
    """pack(w_NK, out=None) -> packed, a layout derived from a weight, for `linear` and `row_linear`."""
    row_linear: Callable
    """* row_linear(x_TK, w_NK, num_leaves, packed=None, out_dtype=torch.float32) -> root_TN."""
    tree_sum: Callable
    """* tree_sum(parts_GTN fp32) -> fp32 TN."""
    rmsnorm: Callable
    """* rmsnorm(x_TH, w_H, eps, offset=0.0) -> y_TH."""
    add_rmsnorm: Callable
    """* add_rmsnorm(x_TH, residual_TH, w_H, eps, offset=0.0) -> (y_TH, new_residual_TH)."""
    gated_rmsnorm: Callable
    """* gated_rmsnorm(x_RD, z_RD, w_D, eps) -> y_RD."""
    rope: Callable
    """* rope(x_TND, positions_T int64, cos_sin_PR fp32) -> y_TND."""
    silu_mul: Callable
    """* silu_mul(gate_TF, up_TF) -> y_TF."""
    sigmoid_mul: Callable
    """* sigmoid_mul(x_TF, gate_TF or gate_T1) -> y_TF."""
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
    mla: Callable
    """* mla(q_TNQ, c_TQ, cu_seqlens, scale, latent) -> o_TNL."""
    head_linear: Callable
    """* head_linear(x_TNK, w_NMK) -> y_TNM."""
    mla_cache_shape: Callable
    """mla_cache_shape(num_pages, page_size, width) -> shape of one layer's cache."""
    write_latent: Callable
    """write_latent(c_TQ, cache, slots_T)."""
    mla_paged: Callable
    """mla_paged(q_TNQ, cache, block_table, query_start, seq_lens, scale, latent, out=None) -> o_TNL."""
    route: Callable
    """* route(logits_TE fp32, top_k, rule, bias_E=None) -> (weights_TK fp32, experts_TK int32 ascending)."""
    combine: Callable
    """* combine(y_SH, order_S, weights_TK, shared_TH=None) -> out_TH."""
    dispatch: Callable
    """dispatch(experts_TK, num_experts) -> (order_S int64, starts_E1 int32)."""
    expand: Callable
    """* expand(x_TH, order_S) -> x_SH."""
    grouped_linear: Callable
    """* grouped_linear(x_SK, w_ENK, starts_E1, out_dtype=None) -> y_SN."""
    gdn: Callable
    """* gdn(x_TC, a_TV, b_TV, conv_CW, a_log_V, dt_bias_V, cu_seqlens, heads) -> o_TVD."""
    gdn_states: Callable
    """gdn_states(heads, conv_width, dtype) -> ((shape, dtype), ...) of one page."""
    gdn_paged: Callable
    """gdn_paged(x, a, b, conv, a_log, dt_bias, states, block_table, query_start, seq_lens, page_size, heads) -> o."""
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
    tally: Tally = field(default_factory=Tally, repr=False)
    """What the functions record."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "case":
            self.tally.enter(value)
        elif name in self.__dict__ or name not in self.__dataclass_fields__:
            raise FrozenInstanceError(f"kernels: cannot assign to {name!r}")
        else:
            object.__setattr__(self, name, value)

    def need(self, operators: Iterable[str]) -> None:
        """ValueError if one of them was not chosen, in whatever form."""
        have = {FORMS.get(op, op) for op in self.impls}
        if missing := sorted(set(operators) - have):
            raise ValueError(f"kernels: the model needs {missing}, of which no implementation was chosen")

    @property
    def case(self) -> str | None:
        """The case whose calls are counted now."""
        return self.tally.case

    @property
    def served(self) -> set[tuple[str, str]]:
        """(operator, case) of every call so far."""
        return {(op, case) for case, ops in self.tally.cases.items() for op in ops}

    def served_facts(self) -> dict[str, str]:
        """{"served.<op>.<case>": module of the implementation} of every call so far."""
        modules = {op: underlying(getattr(self, MAIN[op])).__module__ for op in self.impls}
        return {f"served.{op}.{case}": modules[op] for op, case in sorted(self.served)}


def underlying(function: Callable) -> Callable:
    """The function below wrappers and partials."""
    while True:
        below = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
        if below is None:
            return function
        function = below


def owners(impls: Mapping[str, str]) -> dict[str, str]:
    """{function: operator that has it} for the operators of `impls`."""
    chosen = {FORMS.get(op, op): op for op in impls}
    return {name: chosen[op] for name, op in FIELD_OP.items() if op in chosen}


def choose(impls: str | Mapping[str, str]) -> dict[str, str]:
    """{operator: file}; one name stands for it in every operator that is no form of another.

    ValueError for an unknown or unfit name, and for two forms of one operator.
    """
    named = dict.fromkeys(op for op in OPS if op not in FORMS) if isinstance(impls, str) else impls
    files = dict.fromkeys(named, impls) if isinstance(impls, str) else dict(impls)
    if unknown := sorted(files.keys() - set(OPS)):
        raise ValueError(f"kernels: unknown operators {unknown}; known are {OPS}")
    for form, op in FORMS.items():
        if files.keys() >= {form, op}:
            raise ValueError(f"kernels: {form} and {op} are two forms of one operator; choose one")
    for op, file in files.items():
        if file not in IMPLEMENTATIONS or not (Path(__file__).parent / op / f"{file}.py").is_file():
            raise ValueError(f"kernels: no implementation {file!r} of {op}; known are {sorted(IMPLEMENTATIONS)}")
    return files


def absent(name: str) -> Callable:
    """What stands for a function whose operator was not chosen."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError(f"kernels: {name} was called, but no implementation of {FIELD_OP[name]} was chosen")

    return refuse


def load_kernels(impls: str | Mapping[str, str], schedule: Schedule) -> Kernels:
    """The operators of one implementation, or those named with theirs, bound to `schedule`. See `choose`."""
    files = choose(impls)
    modules = {op: import_module(f"skyrl_isoexec.kernels.{op}.{file}") for op, file in files.items()}
    owned = owners(files)
    functions = {name: getattr(modules[op], name) for name, op in owned.items()}
    for name in owned.keys() & set(SCHEDULED):
        functions[name] = partial(functions[name], schedule=schedule)
    for name in owned.keys() & set(LEAVED):
        functions[name] = partial(functions[name], num_leaves=schedule.num_leaves)
    tally = Tally()
    for name in owned.keys() - set(UNCOUNTED):
        functions[name] = counted(functions[name], owned[name], tally)
    functions |= {name: absent(name) for name in FIELD_OP.keys() - owned.keys()}
    return Kernels(impls=files, schedule=schedule, tally=tally, **functions)
