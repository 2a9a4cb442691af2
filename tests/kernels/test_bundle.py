"""Kernels are chosen by name, whole, and without importing a compiler before they are."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skyrl_isoexec.kernels import bundle
from skyrl_isoexec.kernels.bundle import FIELD_OP, FORMS, IMPLEMENTATIONS, OPS, UNCOUNTED, Kernels, load_kernels
from skyrl_isoexec.schedule import Schedule


@pytest.fixture
def kernels() -> Kernels:
    return load_kernels("cpu", Schedule(num_leaves=4))


PLAIN = [op for op in OPS if op not in FORMS]
"""Operators that are no form of another."""


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_every_operator_is_there(impl):
    kernels = load_kernels(impl, Schedule(num_leaves=2))
    for name in FIELD_OP:
        assert callable(getattr(kernels, name))
    assert kernels.impls == dict.fromkeys(PLAIN, impl) and kernels.schedule == Schedule(num_leaves=2)
    for name in ("linear", "impls", "served", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kernels, name, None)


def test_lists_are_complete():
    """Every folder with a definition is an operator, and every function of `Kernels` belongs to one."""
    folders = {p.parent.name for p in Path(bundle.__file__).parent.glob("*/spec.py")}
    functions = {field.name for field in dataclasses.fields(Kernels)} - {"impls", "schedule", "tally"}
    assert set(OPS) == folders == set(FIELD_OP.values()) | set(FORMS) and set(FIELD_OP) == functions


def test_each_operator_can_have_its_own(same_bits):
    """One name for each operator, and nothing but the names decides."""
    mixed = load_kernels(dict.fromkeys(PLAIN, "cpu") | {"rope": "reference"}, Schedule())
    assert mixed.rope.__module__.endswith("rope.reference") and mixed.linear.__module__.endswith("linear.cpu")
    assert mixed.impls["rope"] == "reference"
    names = dict.fromkeys(PLAIN, "cpu")
    for wrong, message in (
        (names | {"gdn_cpr": "cpu"}, "gdn_cpr and gdn are two forms of one operator"),
        (names | {"rop": "cpu"}, "unknown operators \\['rop'\\]"),
        (names | {"rope": "triton"}, "no implementation 'triton' of rope"),
        (names | {"rope": "spec"}, "no implementation 'spec' of rope"),
    ):
        with pytest.raises(ValueError, match=message):
            load_kernels(wrong, Schedule())


def test_what_was_not_chosen_refuses_to_be_called():
    """A model says what it needs, in whatever form; a function without an operator names it."""
    some = load_kernels({"rope": "cpu", "gdn_cpr": "reference"}, Schedule())
    some.need(["rope", "gdn"])
    assert some.gdn.__module__.endswith("gdn_cpr.reference")
    with pytest.raises(ValueError, match=r"the model needs \['attention', 'linear'\]"):
        some.need(["rope", "linear", "attention"])
    with pytest.raises(ValueError, match="linear was called, but no implementation of linear was chosen"):
        some.linear(torch.randn(2, 8), torch.randn(4, 8))


def test_calls_are_recorded_by_case(kernels):
    """Nothing before a case is entered, then each operator that computes, under the case of the time."""
    x, w = torch.randn(2, 8), torch.randn(4, 8)
    kernels.linear(x, w)
    assert kernels.case is None and kernels.served == set()
    kernels.case = "engine_decode"
    kernels.linear(x, w, packed=kernels.pack(w))
    kernels.add_rmsnorm(x, x, x[0], 1e-6)
    kernels.case = "trainer_fwd"
    kernels.tree_sum(torch.ones(2, 3))
    kernels.kv_cache_shape(1, 16, 1, 2)
    kernels.case = None
    kernels.logprobs(x)
    expected = {("linear", "engine_decode"), ("rmsnorm", "engine_decode"), ("row_linear", "trainer_fwd")}
    assert kernels.served == expected
    module = "skyrl_isoexec.kernels.{}.cpu"
    assert kernels.served_facts() == {f"served.{op}.{case}": module.format(op) for op, case in expected}


def test_every_function_that_computes_is_recorded(kernels):
    """Wrappers show the function they wrap, also below a partial, and one attribute is one object."""
    for name, op in FIELD_OP.items():
        function = getattr(kernels, name)
        assert getattr(kernels, name) is function
        assert hasattr(function, "__wrapped__") == (name not in UNCOUNTED)
        module = sys.modules[f"skyrl_isoexec.kernels.{op}.cpu"]
        assert bundle.underlying(function) is getattr(module, name)
    assert kernels.attention.__wrapped__.func is sys.modules["skyrl_isoexec.kernels.attention.cpu"].attention
    assert kernels.attention.__qualname__ == "attention" and kernels.attention.__doc__


def test_implementations_agree(same_bits):
    """A few rows through both names, over the operators bound to the schedule as well."""
    schedule = Schedule(num_leaves=4)
    cpu, reference = (load_kernels(impl, schedule) for impl in ("cpu", "reference"))
    x, w = torch.randn(5, 64), torch.randn(32, 64)
    same_bits(cpu.row_linear(x, w, 4), reference.row_linear(x, w, 4))
    same_bits(cpu.logprobs(x), reference.logprobs(x))
    q, cu = x.view(5, 2, 32), torch.tensor([0, 5], dtype=torch.int32)
    same_bits(cpu.attention(q, q, q, cu, 0.2), reference.attention(q, q, q, cu, 0.2))


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'triton' of attention.*'cpu', 'kernel', 'reference'"):
        load_kernels("triton", Schedule())


def test_the_kernels_of_hopper_need_no_compiler_of_the_cpu():
    """A process that computes with them imports neither numba nor a file of the CPU's loops."""
    pytest.importorskip("triton")
    code = "import sys\nfrom skyrl_isoexec.kernels.bundle import load_kernels\n"
    code += "from skyrl_isoexec.schedule import Schedule\nload_kernels('kernel', Schedule(num_leaves=2))\n"
    code += "found = [name for name in sys.modules if name.startswith('skyrl_isoexec') and name.endswith('.cpu')]\n"
    code += "assert not found and 'numba' not in sys.modules, found"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_the_bundle_imports_no_compiler():
    code = "import sys, skyrl_isoexec.kernels.bundle; assert not {'numba', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
