"""A witness reads what is bound and computes what rounds; a swapped part, a constant or a mode shows."""

import threading
from functools import partial

import pytest
import torch

from skyrl_isoexec.kernels import witness
from skyrl_isoexec.kernels.attention import reference
from skyrl_isoexec.kernels.bundle import FORMS, OPS, load_kernels
from skyrl_isoexec.kernels.linear import cpu
from skyrl_isoexec.kernels.sources import impl_source
from skyrl_isoexec.kernels.witness import WitnessError, bound, constants, numeric
from skyrl_isoexec.schedule import Schedule

SCHEDULE = Schedule(num_leaves=4, kv_block=32, kv_partition=64)


PLAIN = [op for op in OPS if op not in FORMS]
"""Operators that are no form of another."""


@pytest.fixture
def kernels():
    return load_kernels(dict.fromkeys(PLAIN, "cpu") | {"rope": "reference"}, SCHEDULE)


def replaced(kernels, **functions):
    """The same kernels with other functions, as a fault would leave them."""
    for name, function in functions.items():
        object.__setattr__(kernels, name, function)
    return kernels


def test_functions_and_sources(kernels) -> None:
    facts = bound(kernels)
    assert sorted(facts) == sorted(f"kernel.{op}.{what}" for op in PLAIN for what in ("function", "source"))
    assert facts["kernel.swiglu.function"] == "skyrl_isoexec.kernels.swiglu.cpu.silu_mul"
    assert facts["kernel.logprob.function"] == "skyrl_isoexec.kernels.logprob.cpu.logprobs"
    assert facts["kernel.rope.function"] == "skyrl_isoexec.kernels.rope.reference.rope"
    for op, file in kernels.impls.items():
        assert facts[f"kernel.{op}.source"] == impl_source(f"{op}.{file}")


def test_a_swapped_function_shows(kernels) -> None:
    """A main function by its name and source, another one by a refusal that names it."""
    other = bound(replaced(kernels, rope=load_kernels("cpu", SCHEDULE).rope))
    assert other["kernel.rope.function"] == "skyrl_isoexec.kernels.rope.cpu.rope"
    assert other["kernel.rope.source"] == impl_source("rope.cpu")
    with pytest.raises(WitnessError, match="kernels.attention_paged is .*attention.reference.attention_paged"):
        bound(replaced(kernels, attention_paged=partial(reference.attention_paged, schedule=SCHEDULE)))


def test_a_replaced_attribute_of_a_module_shows(monkeypatch) -> None:
    monkeypatch.setattr(cpu, "linear", lambda *arguments: None)
    name = bound(load_kernels("cpu", SCHEDULE))["kernel.linear.function"]
    assert name.startswith(f"{__name__}.") and name.endswith("<lambda>")


def test_constants_come_from_the_functions(kernels) -> None:
    dense = {"constant.num_leaves": 4, "constant.kv_block": 32, "constant.kv_partition": 64}
    assert constants(kernels) == dense | {"constant.gdn_chunk": 64}
    assert constants(load_kernels(dict.fromkeys(("attention", "logprob"), "cpu"), SCHEDULE)) == dense
    other = partial(kernels.logprobs.__wrapped__.func, num_leaves=2)
    with pytest.raises(WitnessError, match="logprobs has num_leaves = 2, another has 4"):
        constants(replaced(kernels, logprobs=other))
    with pytest.raises(WitnessError, match="attention is bound to no schedule"):
        constants(replaced(kernels, attention=reference.attention))


def test_numeric() -> None:
    assert numeric() == {
        "numeric.flush_subnormals": False,
        "numeric.rounding": "nearest",
        "numeric.threads": torch.get_num_threads(),
    }


def test_flushing_is_seen() -> None:
    """In the thread that flushes, and only there."""
    found = []

    def work() -> None:
        torch.set_flush_denormal(True)
        found.append(witness.numeric()["numeric.flush_subnormals"])
        torch.set_flush_denormal(False)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True] and not numeric()["numeric.flush_subnormals"]
