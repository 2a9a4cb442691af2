"""Facts that are read off a live decoder and off what a process imported, rather than off what is installed."""

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest
import torch

from skyrl_isoexec.kernels.bundle import load_kernels
from skyrl_isoexec.model.axes import SingleAxis
from skyrl_isoexec.model.facts import device_facts, one_place, version
from skyrl_isoexec.model.layers import Place


def test_one_place(m) -> None:
    """Kernels are reported from the decoder; a module that computes with others would not be in any fact."""
    decoder = m.build(*m.toy("qwen3"), num_leaves=4)
    assert one_place(decoder)
    place = decoder.lm_head.place
    for kernels, axis, leaves, experts in (
        (load_kernels("cpu", decoder.schedule), place.axis, place.num_leaves, None),
        (place.kernels, SingleAxis(), place.num_leaves, None),
        (place.kernels, place.axis, 2, None),
        (place.kernels, place.axis, place.num_leaves, SingleAxis()),
    ):
        decoder.model.layers["0"].mlp.place = Place(kernels, axis, leaves, place.dtype, place.device, experts)
        assert not one_place(decoder)
    decoder.model.layers["0"].mlp.place = place
    assert one_place(decoder)
    decoder.axis = SingleAxis()
    assert not one_place(decoder)


@pytest.mark.parametrize(
    ("installed", "imported", "said"),
    [
        ("2.11.0", "2.11.0", "2.11.0"),
        ("2.11.0", "2.11.0+cu130", "2.11.0"),
        ("2.11.0+cpu", "2.11.0", "2.11.0+cpu"),
        ("2.11.0", "2.10.0", "2.11.0, imported 2.10.0"),
        ("2.11.0", "2.11.0.dev1", "2.11.0, imported 2.11.0.dev1"),
        ("2.11.0", None, "2.11.0"),
    ],
)
@pytest.mark.parametrize(("distribution", "module"), [("numba", "numba"), ("megatron-core", "megatron.core")])
def test_what_was_imported(monkeypatch, distribution: str, module: str, installed: str, imported, said: str) -> None:
    """A package that came from elsewhere on the path is not the one whose metadata is installed."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**({} if imported is None else {"__version__": imported})))
    assert version(distribution) == said


def test_versions_of_this_installation() -> None:
    """The module and the metadata agree here; what is not installed has no version."""
    import numpy
    import torch
    import transformers

    for module in (numpy, torch, transformers):
        assert version(module.__name__) == importlib.metadata.version(module.__name__)
    assert version("no-such-distribution") is None


def test_the_assembler_is_the_one_that_compiles_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that was chosen when the kernels were imported."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("nothing is assembled")
    from skyrl_isoexec.kernels.numeric.sm90 import ASSEMBLER, ASSEMBLER_VERSION

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert device_facts() == {"device.arch": "sm90", "device.assembler": ASSEMBLER_VERSION}
    with triton.knobs.nvidia.scope():
        triton.knobs.nvidia.ptxas = str(ASSEMBLER.with_name("ptxas"))
        assert device_facts()["device.assembler"] != ASSEMBLER_VERSION
    assert device_facts()["device.assembler"] == ASSEMBLER_VERSION
