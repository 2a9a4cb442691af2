"""Kernels are chosen by name, whole, and without importing a compiler before they are."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from skyrl_isoexec.kernels.bundle import IMPLEMENTATIONS, Kernels, load_kernels
from skyrl_isoexec.schedule import Schedule


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_every_operator_is_there(impl):
    kernels = load_kernels(impl, Schedule(num_leaves=2))
    for field in dataclasses.fields(Kernels):
        if field.name not in ("impl", "schedule"):
            assert callable(getattr(kernels, field.name))
    assert kernels.impl == impl and kernels.schedule == Schedule(num_leaves=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernels.linear = None


def test_implementations_agree(same_bits):
    """A few rows through both names, over the operators bound to the schedule as well."""
    schedule = Schedule(num_leaves=4)
    cpu, reference = (load_kernels(impl, schedule) for impl in IMPLEMENTATIONS)
    x, w = torch.randn(5, 64), torch.randn(32, 64)
    same_bits(cpu.row_linear(x, w, 4), reference.row_linear(x, w, 4))
    same_bits(cpu.logprobs(x), reference.logprobs(x))
    q, cu = x.view(5, 2, 32), torch.tensor([0, 5], dtype=torch.int32)
    same_bits(cpu.attention(q, q, q, cu, 0.2), reference.attention(q, q, q, cu, 0.2))


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'triton'.*'cpu', 'reference'"):
        load_kernels("triton", Schedule())


def test_importing_the_bundle_imports_no_compiler():
    code = "import sys, skyrl_isoexec.kernels.bundle; assert not {'numba', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
