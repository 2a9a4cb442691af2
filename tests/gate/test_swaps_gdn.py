"""The gates of both forms of the gated delta rule find a change of order: the same numbers with one pair exchanged."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from skyrl_isoexec.gate.run import SCHEDULE
from skyrl_isoexec.kernels.numeric import exp, gdn_cases, gdn_proof, narrow
from skyrl_isoexec.kernels.numeric.gdn_chunk import by_value_head, close, decays, ordered
from skyrl_isoexec.kernels.numeric.gdn_requests import Subject
from skyrl_isoexec.schedule import Schedule

FORMS = ("gdn", "gdn_cpr")


def copied(name: str) -> ModuleType:
    """A module of the kernels as one of its own, to be changed."""
    original = importlib.import_module(f"skyrl_isoexec.kernels.{name}")
    spec = importlib.util.spec_from_file_location(f"changed_{name.replace('.', '_')}", original.__file__)
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for their module
    spec.loader.exec_module(made)
    return made


def exchanged(size: int) -> list[int]:
    """0 .. size - 1 with 1 and 2 exchanged."""
    order = list(range(size))
    if size > 2:
        order[1], order[2] = 2, 1
    return order


def definition(op: str, **functions: object) -> ModuleType:
    """The definition of a form with some of the functions that it calls changed."""
    changed = copied(f"{op}.reference")
    for name, function in functions.items():
        assert hasattr(changed, name)
        setattr(changed, name, function)
    return changed


def two_taps(op: str) -> ModuleType:
    """The second and the third product of the convolution."""
    rows = copied("numeric.gdn_rows")

    def convolve(window: Tensor, conv: Tensor) -> Tensor:
        count, total = window.shape[0] - conv.shape[1] + 1, torch.zeros(())
        for i in exchanged(conv.shape[1]):
            total = total + window[i : i + count] * conv[:, i]
        return total / (exp(-total) + 1.0)

    rows.convolve = convolve
    return definition(op, prepare=rows.prepare)


def two_lanes(op: str) -> ModuleType:
    """The second and the third of the 16 partial sums of a norm, which a tree adds in other pairs."""
    rows = copied("numeric.gdn_rows")
    original = rows.lane_sum
    rows.lane_sum = lambda x: original(x[..., exchanged(x.shape[-1])])
    return definition(op, prepare=rows.prepare)


def with_chunk(op: str, **functions: object) -> ModuleType:
    """The definition over a chunk form with changed functions."""
    chunk = copied("numeric.gdn_chunk")
    for name, function in functions.items():
        assert hasattr(chunk, name)
        setattr(chunk, name, function)
    return definition(op, extend=chunk.extend, close=chunk.close)


def two_rows_of_the_substitution(op: str) -> ModuleType:
    """The second and the third row that are taken from a later one."""

    def substitute(lower: Tensor, inverse: Tensor, first: int) -> None:
        for t in range(first, first + lower.shape[1]):
            row = torch.zeros(inverse.shape[0], inverse.shape[2])
            for s in exchanged(t):
                row = row + -lower[:, t - first, s, None] * inverse[:, s]
            inverse[:, t] = torch.eye(inverse.shape[2])[t]
            inverse[:, t, :t] = row[:, :t]

    return with_chunk(op, substitute=substitute)


def two_rows_of_the_chain(op: str) -> ModuleType:
    """The second and the third row that a chunk adds to the chain."""
    chunk = copied("numeric.gdn_chunk")
    original = chunk.ordered
    chunk.ordered = lambda weights, rows, first=None: original(
        weights[:, :, exchanged(rows.shape[1])], rows[:, exchanged(rows.shape[1])]
    )
    return definition(op, close=chunk.close)


def a_chain_that_starts_from_its_snapshot(op: str) -> ModuleType:
    """The chain rounded at a chunk's start, as its reader sees it: no change in fp32, so bf16 finds it."""
    chunk = copied("numeric.gdn_chunk")
    original = chunk.close

    def rounded(chunk_: object, chain: Tensor, dtype: torch.dtype) -> None:
        chain.copy_(narrow(chain, dtype))
        original(chunk_, chain, dtype)

    return definition(op, close=rounded)


def scaled_before_the_decay(op: str) -> ModuleType:
    """The scale on a score before its decay."""
    changed = copied("gdn.reference")

    def outputs(chunk, first, rows, snapshot, dtype):
        scale = torch.tensor(rows.q_nKD.shape[2] ** -0.5, dtype=torch.float32)
        group = rows.g_nV.shape[1] // rows.k_nKD.shape[1]
        stop, q = first + rows.g_nV.shape[0], by_value_head(rows.q_nKD, group)
        keys = chunk.keys_KDC[:, :, :stop].repeat_interleave(group, 0)
        scores = narrow(decays(chunk, first, stop) * (ordered(q, keys) * scale), dtype).float()
        inside = ordered(scores, chunk.fresh_VCD[:, :stop], first)
        return (exp(chunk.decay_VC[:, first:stop, None]) * scale) * ordered(q, snapshot) + inside

    changed.outputs = outputs
    return changed


def the_state_updated_before_the_last_output(op: str) -> ModuleType:
    """A chunk's last output from the state after the chunk, which is the same number."""
    changed = copied("gdn.reference")
    original = changed.outputs

    def outputs(chunk, first, rows, snapshot, dtype):
        found = original(chunk, first, rows, snapshot, dtype)
        if first + rows.g_nV.shape[0] == chunk.decay_VC.shape[1]:
            after, group = snapshot.clone(), rows.g_nV.shape[1] // rows.k_nKD.shape[1]
            close(chunk, after, torch.float32)
            q = by_value_head(rows.q_nKD, group)[:, -1:]
            found[:, -1:] = ordered(q, after) * rows.q_nKD.shape[2] ** -0.5
        return found

    changed.outputs = outputs
    return changed


def an_output_before_its_update(op: str) -> ModuleType:
    """o = q S + (q . k) d with the state before the update, which is the same number."""
    times = importlib.import_module(f"skyrl_isoexec.kernels.{op}.reference").times

    def recur(state, rows):
        group, outs = rows.g_nV.shape[1] // rows.k_nKD.shape[1], []
        q_n, k_n = (x.repeat_interleave(group, 1) for x in (rows.q_nKD, rows.k_nKD))
        for q, k, v, g, beta in zip(q_n, k_n, rows.v_nVD, rows.g_nV, rows.beta_nV, strict=True):
            state *= exp(g)[:, None, None]
            new = beta[:, None] * (v - times(k, state))
            outs.append((times(q, state) + times(q, k[:, :, None]) * new) * q.shape[1] ** -0.5)
            state += k[:, :, None] * new[:, None]
        return torch.stack(outs)

    return definition(op, recur=recur)


def a_chain_from_the_recurrence(op: str) -> ModuleType:
    """The chain taken from the recurrent state at a chunk's end, without the pass over the chunk."""
    changed = copied("gdn_cpr.reference")

    def advance_chain(states, page, chain, dtype):
        chain.copy_(states[changed.RECURRENT][page])

    changed.advance_chain = advance_chain
    return changed


def another_chunk_in_decode(op: str) -> SimpleNamespace:
    """Steps of one row of each request close chunks of half the length, over the first half of what a page has."""
    cpu, changed = importlib.import_module(f"skyrl_isoexec.kernels.{op}.cpu"), copied(f"{op}.reference")
    half = SCHEDULE.gdn_chunk // 2
    original = changed.gdn_paged

    def gdn_paged(x, a, b, conv, a_log, dt_bias, states, table, starts, *rest, schedule: Schedule) -> Tensor:
        rows = (x, a, b, conv, a_log, dt_bias)
        if not bool((starts.diff() == 1).all()):
            return cpu.gdn_paged(*rows, states, table, starts, *rest, schedule=schedule)
        lengths = [
            shape for shape, _ in cpu.gdn_states(rest[2], conv.shape[1], x.dtype, schedule=Schedule(gdn_chunk=half))
        ]
        views = [
            state[tuple(slice(n) for n in (len(state), *shape))] for state, shape in zip(states, lengths, strict=True)
        ]
        changed.check_paged = lambda *_: None
        return original(*rows, views, table, starts, *rest, schedule=Schedule(gdn_chunk=half))

    return SimpleNamespace(**vars(cpu) | {"gdn_paged": gdn_paged})


def a_chain_rounded_between_steps(op: str) -> SimpleNamespace:
    """The chain of every page rounded to bf16 after each step, so that only its snapshot is carried."""
    cpu, spec = (importlib.import_module(f"skyrl_isoexec.kernels.{op}.{file}") for file in ("cpu", "spec"))

    def gdn_paged(*operands, schedule: Schedule) -> Tensor:
        out = cpu.gdn_paged(*operands, schedule=schedule)
        chain = operands[6][spec.CHAIN]
        chain.copy_(chain.bfloat16())
        return out

    return SimpleNamespace(**vars(cpu) | {"gdn_paged": gdn_paged})


ANY = (
    two_taps,
    two_lanes,
    two_rows_of_the_substitution,
    two_rows_of_the_chain,
    a_chain_that_starts_from_its_snapshot,
)
CHANGES = [
    (op, change) for op in FORMS for change in (*ANY, another_chunk_in_decode, a_chain_rounded_between_steps)
] + [
    ("gdn", scaled_before_the_decay),
    ("gdn", the_state_updated_before_the_last_output),
    ("gdn_cpr", an_output_before_its_update),
    ("gdn_cpr", a_chain_from_the_recurrence),
]


def prove(op: str, proof, impl: object, **named: object) -> None:
    importlib.import_module(f"skyrl_isoexec.kernels.{op}.gate").prove(proof, impl, SCHEDULE, **named)


@pytest.mark.parametrize(("op", "change"), CHANGES, ids=lambda x: getattr(x, "__name__", x))
def test_a_change_of_order_is_found(op: str, change: Callable, stopping, difference) -> None:
    """In the first comparison that can see it."""
    given = {"dtypes": {"bf16": torch.bfloat16}} if change is a_chain_that_starts_from_its_snapshot else {}
    with pytest.raises(difference, match="elements differ"):
        prove(op, stopping, change(op), **given)


@pytest.mark.parametrize("op", FORMS)
def test_the_unchanged_definition_has_the_bits(op: str, stopping) -> None:
    """What the changes are made of: a copy of the definition over a copy of its chunk form."""
    cpu = importlib.import_module(f"skyrl_isoexec.kernels.{op}.cpu")
    for dtype in (torch.float32, torch.bfloat16):
        given, cu = gdn_cases.rows(gdn_cases.Case(), dtype)
        expected, found = (m.gdn(*given, cu, gdn_cases.SMALL, schedule=SCHEDULE) for m in (cpu, with_chunk(op)))
        stopping.equal(op, expected, found)


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize(
    ("change", "check"),
    [(another_chunk_in_decode, "decode"), (a_chain_rounded_between_steps, "cut prefill")],
)
def test_the_ways_are_compared_without_a_definition(op, change, check, stopping, difference, monkeypatch) -> None:
    """As on a device whose order PyTorch does not state: a change in one way alone shows beside the others."""
    gate = importlib.import_module(f"skyrl_isoexec.kernels.{op}.gate")
    monkeypatch.setattr(gate, "TENSOR_CORE_HEADS", gate.HEADS)
    with pytest.raises(difference, match=f"bf16 {check}.*elements differ"):
        prove(op, stopping, change(op), dtypes={"bf16": torch.bfloat16}, definition=None)


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize(("key_width", "width"), gdn_proof.NARROW)
def test_a_change_in_one_other_width_is_found(op, key_width, width, stopping, difference, monkeypatch) -> None:
    """In decode alone, and only of heads that are not as wide as those of most cases."""
    gate = importlib.import_module(f"skyrl_isoexec.kernels.{op}.gate")
    cpu, changed = importlib.import_module(f"skyrl_isoexec.kernels.{op}.cpu"), another_chunk_in_decode(op)

    def gdn_paged(*operands, schedule: Schedule) -> Tensor:
        is_changed = (operands[11].key_width, operands[11].value_width) == (key_width, width)
        return (changed if is_changed else cpu).gdn_paged(*operands, schedule=schedule)

    monkeypatch.setattr(gate, "TENSOR_CORE_HEADS", gate.HEADS)
    impl = SimpleNamespace(**vars(cpu) | {"gdn_paged": gdn_paged})
    with pytest.raises(difference, match=f"bf16 {key_width} by {width} decode.*elements differ"):
        prove(op, stopping, impl, dtypes={"bf16": torch.bfloat16}, definition=None)


def a_reader_that_writes(op: str) -> SimpleNamespace:
    """The page that a step reads, cleared where the step goes on in another one."""
    cpu = importlib.import_module(f"skyrl_isoexec.kernels.{op}.cpu")

    def gdn_paged(*operands, schedule: Schedule) -> Tensor:
        out = cpu.gdn_paged(*operands, schedule=schedule)
        states, table, starts, lengths, page_size = operands[6:11]
        for pages, first in zip(table, (lengths - starts.diff()).tolist(), strict=False):
            if first and first % page_size == 0:
                states[0][pages[first // page_size - 1]] = 0.0
        return out

    return SimpleNamespace(**vars(cpu) | {"gdn_paged": gdn_paged})


def padding_that_writes(op: str) -> SimpleNamespace:
    """The page that a request without rows names, or the last one, cleared."""
    cpu = importlib.import_module(f"skyrl_isoexec.kernels.{op}.cpu")

    def gdn_paged(*operands, schedule: Schedule) -> Tensor:
        out = cpu.gdn_paged(*operands, schedule=schedule)
        for pages, count in zip(operands[7], operands[8].diff().tolist(), strict=False):
            if not count:
                operands[6][1][pages[0]] = 0.0
        return out

    return SimpleNamespace(**vars(cpu) | {"gdn_paged": gdn_paged})


def padding_that_is_cleared(op: str) -> SimpleNamespace:
    """Rows of the output past the last request."""
    cpu = importlib.import_module(f"skyrl_isoexec.kernels.{op}.cpu")

    def gdn_paged(*operands, schedule: Schedule) -> Tensor:
        out = cpu.gdn_paged(*operands, schedule=schedule)
        out[int(operands[8][-1]) :] = 0.0
        return out

    return SimpleNamespace(**vars(cpu) | {"gdn_paged": gdn_paged})


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize(
    ("change", "check", "says"),
    [
        (a_reader_that_writes, gdn_proof._prefix, "pages of a prefix"),
        (padding_that_writes, gdn_proof._padding, "padding, table entries"),
        (padding_that_is_cleared, gdn_proof._padding, "padding, table entries"),
    ],
)
def test_memory_of_others_is_watched(op, change, check, says, stopping, difference) -> None:
    """A page that others read, and what padding must leave alone."""
    gate = importlib.import_module(f"skyrl_isoexec.kernels.{op}.gate")
    subject = Subject(
        proof=stopping, impl=importlib.import_module(f"skyrl_isoexec.kernels.{op}.cpu"), schedule=SCHEDULE,
        label="fp32", dtype=torch.float32, definition=None, live=None, heads=gate.HEADS,
    )  # fmt: skip
    check(subject)
    with pytest.raises(difference, match=says):
        check(replace(subject, impl=change(op)))
