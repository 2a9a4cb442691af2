"""`isoexec bench gdn`: both forms of the gated delta rule beside the stock kernels, on head counts of real models.

Notable: both arms do the same work, from a layer's projections to before its gated norm: convolution, norms, gates and
the rule. The stock arms are flash-linear-attention's `causal_conv1d` and `chunk_gated_delta_rule` for training and
prefill, and vLLM's `causal_conv1d_update` and packed recurrent decode. An arm that is not installed says so, and then
there is no ratio and the command ends with 2, as it does where a form has no valid gate. Under Triton 3.4 to 3.7.0
flash-linear-attention refuses to train on Hopper, because a kernel of its backward gives wrong numbers there;
`--refused-native` times it nevertheless, and the table says so. All times are medians of replayed graphs. The floor is
the time that the bytes of the problem need at the memory's bandwidth.

Shapes: T tokens, R requests, C channels, V value heads, Dk and Dv head widths.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_isoexec.bench.timing import floor_ms, milliseconds
from skyrl_isoexec.gate.record import GateError, require
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.schedule import Schedule

HEADS = {
    "whole": (16, 32, "Qwen3.5-9B and Qwen3.5-35B-A3B"),
    "half": (8, 16, "of them over two ranks"),
    "quarter": (4, 8, "over four, as the published training time"),
    "eighth": (2, 4, "over eight, as the published decode time"),
}
"""Key heads, value heads, and whose they are; all are 128 wide."""
WIDTH, TAPS, PAGE = 128, 4, 1024
TRAIN, PREFILL, DECODE = 10240, (5, 2048), 256
"""Tokens of one training sequence; sequences and tokens of a prefill; requests of a decode step: as published."""
FORMS = ("gdn", "gdn_cpr")
WORK = ("train", "prefill", "decode")
SCHEDULE = Schedule(gdn_chunk=64)
POSITIONS = (0, 31, 63)
"""Rows of the chunk that decode is also timed at, all requests alike."""
BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Row:
    """One piece of work: operands, our arms by form, the stock arm."""

    work: str
    shape: str
    operands: list[tuple]
    ours: dict[str, Callable]
    native: tuple[Callable, list[tuple]] | str
    """The stock arm and its operands, or why there is none."""
    num_bytes: int
    spare: Callable | None = None
    """What the stock arm does only because it runs again and again: its time is taken off."""


def _import(module: str) -> object | str:
    """A module, or why it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{module}: {error}"


LIFTED = "fla.ops.common.chunk_o", "TRITON_ABOVE_3_7_1"
"""A module of fla-core 0.6.0, and what it looks at before it refuses a backward on Hopper."""


def lift_refusal() -> str | None:
    """Let the stock arm train for the sake of its time, whatever its numbers are; why not, or None."""
    module, name = _import(LIFTED[0]), LIFTED[1]
    if isinstance(module, str) or not hasattr(module, name):
        return module if isinstance(module, str) else f"{LIFTED[0]} has no {name}; is it fla-core 0.6.0?"
    setattr(module, name, True)
    return None


def _normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


def _rows(num: int, heads: GdnHeads) -> tuple[Tensor, ...]:
    """x, a, b, conv, a_log and dt_bias of `num` tokens."""
    values = heads.num_value_heads
    return (
        _normal(num, heads.channels), _normal(num, values), _normal(num, values),
        _normal(heads.channels, TAPS, scale=0.5), _normal(values, scale=0.5), _normal(values) - 4,
    )  # fmt: skip


def _stock_chunks(heads: GdnHeads) -> Callable | str:
    """(x, a, b, conv, a_log, dt_bias, shape [B, T]) -> o by flash-linear-attention."""
    convolution, rule = _import("fla.modules.causal_conv1d.ops"), _import("fla.ops.gated_delta_rule")
    for module in (convolution, rule):
        if isinstance(module, str):
            return module

    def run(x: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, shape: tuple) -> Tensor:
        mixed, _ = convolution.causal_conv1d(x.view(*shape, -1), weight=conv, activation="silu", backend="triton")
        q, k, v = mixed.split(heads.widths, -1)
        q, k = (t.unflatten(-1, (heads.num_key_heads, WIDTH)) for t in (q, k))
        v = v.unflatten(-1, (heads.num_value_heads, WIDTH))
        return rule.chunk_gated_delta_rule(
            q, k, v, g=a.view(*shape, -1), beta=b.view(*shape, -1), use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True, A_log=a_log.float(), dt_bias=dt_bias.float(),
        )[0]  # fmt: skip

    return run


def _train(heads: GdnHeads, kernels: dict) -> Row:
    """Forward and backward of one sequence; gradients of x, a, b and all parameters."""
    leaves = tuple(t.requires_grad_() for t in _rows(TRAIN, heads))
    bounds = torch.tensor([0, TRAIN], dtype=torch.int32, device="cuda")
    grad = _normal(TRAIN, heads.num_value_heads, WIDTH)

    def both(forward: Callable[..., Tensor]) -> Callable:
        return lambda *operands: torch.autograd.grad(forward(*operands), operands[:6], grad)

    ours = {
        form: both(lambda *rows, k=kernel: k.gdn(*rows, bounds, heads, schedule=SCHEDULE))
        for form, kernel in kernels.items()
    }
    stock = _stock_chunks(heads)
    native = stock if isinstance(stock, str) else (both(lambda *rows: stock(*rows, (1, TRAIN))[0]), [leaves])
    size = 2 * TRAIN * (3 * heads.channels + 3 * heads.widths[2])  # x twice and its gradient; o, its gradient twice
    return Row(work="train", shape=f"1x{TRAIN}", operands=[leaves], ours=ours, native=native, num_bytes=size)


def _pool(heads: GdnHeads, num: int, kernel: object) -> list[Tensor]:
    """States of `num` pages, filled with small numbers."""
    shapes = kernel.gdn_states(heads, TAPS, BF16, schedule=SCHEDULE)
    return [(torch.randn(num, *shape, device="cuda") * 0.05).to(dtype) for shape, dtype in shapes]


def _prefill(heads: GdnHeads, kernels: dict) -> Row:
    """Requests from their start, over pages."""
    num, length = PREFILL
    rows = _rows(num * length, heads)
    starts = torch.arange(0, (num + 1) * length, length, dtype=torch.int32, device="cuda")
    lengths = torch.full((num,), length, dtype=torch.int32, device="cuda")
    table = torch.arange(num * length // PAGE, dtype=torch.int32, device="cuda").view(num, -1)
    ours = {}
    for form, kernel in kernels.items():
        states = _pool(heads, table.numel(), kernel)
        ours[form] = lambda *rows, k=kernel, s=states: k.gdn_paged(
            *rows, s, table, starts, lengths, PAGE, heads, schedule=SCHEDULE
        )
    stock = _stock_chunks(heads)
    native = stock if isinstance(stock, str) else (lambda *rows: stock(*rows, PREFILL), [rows])
    size = 2 * num * length * (heads.channels + heads.widths[2]) + 4 * table.numel() * heads.num_value_heads * WIDTH**2
    return Row(work="prefill", shape=f"{num}x{length}", operands=[rows], ours=ours, native=native, num_bytes=size)


def _stock_step(heads: GdnHeads, num: int) -> Callable | str:
    """(x, a, b, conv, a_log, dt_bias) -> o by vLLM, on fp32 states."""
    convolution = _import("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    rule = _import("vllm.model_executor.layers.fla.ops")
    for module in (convolution, rule):
        if isinstance(module, str):
            return module
    values = heads.num_value_heads
    states = torch.randn(num + 1, values, WIDTH, WIDTH, device="cuda") * 0.05
    held = _normal(num + 1, TAPS - 1, heads.channels).transpose(1, 2)
    places = torch.arange(1, num + 1, dtype=torch.int32, device="cuda")
    out = torch.empty(num, 1, values, WIDTH, dtype=BF16, device="cuda")

    def run(x: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
        mixed = convolution.causal_conv1d_update(x.clone(), held, conv, None, "silu", conv_state_indices=places)
        rule.fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=mixed, a=a, b=b, A_log=a_log, dt_bias=dt_bias, scale=WIDTH**-0.5, initial_state=states, out=out,
            ssm_state_indices=places, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    return run


def step_bytes(heads: GdnHeads, row: int) -> int:
    """Bytes that one row-causal step of one request moves at a row of its chunk, each read and written once.

    The convolution's weights, which all requests share, are left out.
    """
    chunk, local, mixed = SCHEDULE.gdn_chunk, row % 16, heads.channels
    snapshot = 2 * WIDTH * WIDTH
    read = snapshot + row * (2 * WIDTH + 2 * chunk + 4) + local * (2 * chunk + 64)  # e, T and G; X and D
    written = 2 * WIDTH + 2 * 2 * chunk + 64 + 8 + 2 * WIDTH  # e; T and X; D; G and beta; o
    end = 3 * snapshot if row == chunk - 1 else 0  # the remainder read and written, the snapshot written
    shared = 2 * WIDTH * (row + 1)  # keys
    return heads.num_value_heads * (read + written + end) + heads.num_key_heads * shared + 2 * mixed * (TAPS + 1)


def _decode(heads: GdnHeads, kernels: dict, row: int | None) -> Row:
    """One row of each request, in its second chunk: at one row of it, or for None spread over all of them."""
    chunk = SCHEDULE.gdn_chunk
    rows = _rows(DECODE, heads)
    at = torch.arange(DECODE, device="cuda") % chunk if row is None else torch.full((DECODE,), row, device="cuda")
    lengths = (at + chunk + 1).int()
    starts = torch.arange(DECODE + 1, dtype=torch.int32, device="cuda")
    table = torch.arange(DECODE, dtype=torch.int32, device="cuda").view(-1, 1)
    out = torch.empty(DECODE, heads.num_value_heads, WIDTH, dtype=BF16, device="cuda")
    ours = {}
    for form, kernel in kernels.items():
        states = _pool(heads, DECODE, kernel)
        ours[form] = lambda *rows, k=kernel, s=states: k.gdn_paged(
            *rows, s, table, starts, lengths, PAGE, heads, out, schedule=SCHEDULE
        )
    stock = _stock_step(heads, DECODE)
    native = stock if isinstance(stock, str) else (stock, [rows])
    places = range(chunk) if row is None else (row,)
    size = DECODE * sum(step_bytes(heads, r) for r in places) // len(places)
    shape = f"{DECODE}x1 " + ("all rows" if row is None else f"row {row}")
    return Row(
        work="decode", shape=shape, operands=[rows], ours=ours, native=native, num_bytes=size,
        spare=lambda x, *_: x.clone(),
    )  # fmt: skip


def work(heads: GdnHeads, kernels: dict, chosen: list[str]) -> Iterator[Row]:
    """The rows of the table for one number of heads."""
    if "train" in chosen:
        yield _train(heads, kernels)
    if "prefill" in chosen:
        yield _prefill(heads, kernels)
    if "decode" in chosen:
        for row in (None, *POSITIONS):
            yield _decode(heads, kernels, row)


def _time(row: Row) -> dict:
    """Milliseconds of each arm; a text for an arm that failed or is not installed."""
    found: dict = {}
    arms = {form: (arm, row.operands) for form, arm in row.ours.items()}
    if isinstance(row.native, str):
        found["native"] = f"not installed: {row.native}"
    else:
        arms["native"] = row.native
    for name, (arm, operands) in arms.items():
        try:
            with torch.set_grad_enabled(row.work == "train"):
                found[name] = milliseconds(arm, operands)
            if name == "native" and row.spare:
                found[name] -= milliseconds(row.spare, operands)
        except Exception as error:  # one arm that fails leaves the others to be timed
            found[name] = f"failed: {error!r}"[:300]
    return found


def line(label: str, row: Row, times: dict, floor: float) -> str:
    """One line of the table, in microseconds."""
    native = times["native"]
    parts = [f"{label:8} {row.work:8} {row.shape:16}"]
    for form in row.ours:
        mine = times[form]
        text = f"{mine * 1e3:9.1f}" if isinstance(mine, float) else mine
        ratio = f"{mine / native:5.2f}" if isinstance(mine, float) and isinstance(native, float) else "    -"
        parts.append(f"{form} {text} ratio {ratio}")
    parts.append("native " + (f"{native * 1e3:9.1f}" if isinstance(native, float) else native))
    return " | ".join([*parts, f"floor {floor * 1e3:7.1f}"])


def run(arguments: argparse.Namespace) -> int:
    """Times everything, prints a line for each, writes the JSON; 2 without a GPU, a gate or a stock arm."""
    labels, chosen = arguments.heads or list(HEADS), arguments.work or list(WORK)
    unknown = sorted(set(labels) - HEADS.keys()) + sorted(set(chosen) - set(WORK))
    if unknown or not torch.cuda.is_available():
        print(f"bench gdn: unknown {unknown}" if unknown else "bench gdn: there is no CUDA device", file=sys.stderr)
        return 2
    kernels, refused = {}, {}
    for form in FORMS:
        try:
            require(form, "sm90")
        except GateError as error:
            refused[form] = str(error)
            print(f"bench gdn {'times unproved' if arguments.unproved else 'refuses'}: {error}")
        if form not in refused or arguments.unproved:
            kernels[form] = importlib.import_module(f"skyrl_isoexec.kernels.{form}.kernel")
    if arguments.refused_native:
        if (problem := lift_refusal()) is not None:
            print(f"bench gdn: --refused-native: {problem}", file=sys.stderr)
            return 2
        print("native trains although it refuses to: of its training, only the time means anything")
    device, results, complete = torch.cuda.get_device_name(0), [], not refused
    print(f"{device}, torch {torch.__version__}; medians of replayed graphs, microseconds")
    for label in labels:
        keys, values, whose = HEADS[label]
        heads = GdnHeads(num_key_heads=keys, num_value_heads=values, key_width=WIDTH, value_width=WIDTH)
        print(f"{label}: {keys} key and {values} value heads of {WIDTH}, {whose}")
        for row in work(heads, kernels, chosen):
            times, floor = _time(row), floor_ms(row.num_bytes, 0)
            complete &= all(isinstance(t, float) for t in times.values())
            results.append({"heads": label, "work": row.work, "shape": row.shape, "ms": times, "floor_ms": floor})
            print(line(label, row, times, floor), flush=True)
            torch.cuda.empty_cache()
    report = {"device": device, "torch": torch.__version__, "unproved": refused}
    report |= {"refused_native": arguments.refused_native, "results": results}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if complete else 2
