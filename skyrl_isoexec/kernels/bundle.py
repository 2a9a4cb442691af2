"""All operators of a model, each from a named implementation: what a model computes with, and what it has computed.

What must stay equal: both sides of a run load the same names with the same schedule. No name is a fallback for another.
"""

from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from functools import partial, update_wrapper
from importlib import import_module
from pathlib import Path

from skyrl_isoexec.schedule import Schedule

OPS = ("attention", "embedding", "linear", "logprob", "rmsnorm", "rope", "row_linear", "swiglu")
"""The operators, by the name of their folder."""
IMPLEMENTATIONS = ("cpu", "kernel", "reference")
"""Files that an operator's folder has one implementation in: compiled for the CPU, for Hopper (Triton), and eager."""
FIELD_OP = {
    "linear": "linear",
    "pack": "linear",
    "row_linear": "row_linear",
    "tree_sum": "row_linear",
    "rmsnorm": "rmsnorm",
    "add_rmsnorm": "rmsnorm",
    "rope": "rope",
    "silu_mul": "swiglu",
    "embedding": "embedding",
    "attention": "attention",
    "kv_cache_shape": "attention",
    "write_kv": "attention",
    "attention_paged": "attention",
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
"""Operator -> its main function: the first that `FIELD_OP` has for it."""
UNCOUNTED = ("pack", "kv_cache_shape", "write_kv", "grad_logits")
"""Functions that give no forward value: their use is not recorded."""


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
    tally: Tally = field(default_factory=Tally, repr=False)
    """What the functions record."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "case":
            self.tally.enter(value)
        elif name in self.__dict__ or name not in self.__dataclass_fields__:
            raise FrozenInstanceError(f"kernels: cannot assign to {name!r}")
        else:
            object.__setattr__(self, name, value)

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
        modules = {op: underlying(getattr(self, name)).__module__ for op, name in MAIN.items()}
        return {f"served.{op}.{case}": modules[op] for op, case in sorted(self.served)}


def underlying(function: Callable) -> Callable:
    """The function below wrappers and partials."""
    while True:
        below = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
        if below is None:
            return function
        function = below


def choose(impls: str | Mapping[str, str]) -> dict[str, str]:
    """{operator: file} of one name for all, or of one for each; ValueError for an unknown, missing or unfit name."""
    files = dict.fromkeys(OPS, impls) if isinstance(impls, str) else dict(impls)
    unknown, missing = sorted(files.keys() - set(OPS)), sorted(set(OPS) - files.keys())
    if unknown or missing:
        raise ValueError(f"kernels: unknown operators {unknown}, missing operators {missing}; each of {OPS} needs one")
    for op, file in files.items():
        if file not in IMPLEMENTATIONS or not (Path(__file__).parent / op / f"{file}.py").is_file():
            raise ValueError(f"kernels: no implementation {file!r} of {op}; known are {sorted(IMPLEMENTATIONS)}")
    return files


def load_kernels(impls: str | Mapping[str, str], schedule: Schedule) -> Kernels:
    """The operators of one implementation, or of one for each operator, bound to `schedule`. See `choose`."""
    files = choose(impls)
    modules = {op: import_module(f"skyrl_isoexec.kernels.{op}.{file}") for op, file in files.items()}
    functions = {name: getattr(modules[op], name) for name, op in FIELD_OP.items()}
    for name in ("attention", "attention_paged", "kv_cache_shape"):
        functions[name] = partial(functions[name], schedule=schedule)
    for name in ("logprobs", "token_logprobs"):
        functions[name] = partial(functions[name], num_leaves=schedule.num_leaves)
    tally = Tally()
    for name in functions.keys() - set(UNCOUNTED):
        functions[name] = counted(functions[name], FIELD_OP[name], tally)
    return Kernels(impls=files, schedule=schedule, tally=tally, **functions)
