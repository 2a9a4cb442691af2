"""What the assembler makes of the Hopper kernels: descriptors of shared memory keep their words apart, without a GPU.

A descriptor is 64 bits: an address in its low word, strides in the other. The step along a product's depth is an
addition to both. ptxas 12.8 can take the address for the strides' word too, which a wider value had when registers were
given out: the tensor core then reads other memory, and nothing but bits shows it.
"""

import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="compiles")

from hopper_source import FOLDER, TARGET, mixed_words, source_of  # noqa: E402
from triton.compiler import CompiledKernel, compile  # noqa: E402

from skyrl_isoexec.kernels.gdn import triton_outputs, triton_step  # noqa: E402
from skyrl_isoexec.kernels.gdn_cpr import triton_recur  # noqa: E402
from skyrl_isoexec.kernels.numeric import sm90, sm90_gdn_chunk  # noqa: E402

KERNELS = {
    "prepare": (sm90_gdn_chunk.prepare, {"DK": 16, "HK": 1, "HV": 2}, {}),
    "attend": (triton_outputs.attend, {}, {}),
    "step": (triton_step.step, {}, {}),
    "close of cpr": (triton_recur.close, {}, {}),
    "step of many columns": (triton_step.step, {"BV": 128}, {"maxnreg": 168}),
}
"""Name -> kernel, constants that differ from the usual, options; the last is a decode step as it is launched."""
SEEN = ("prepare", "attend", "step", "close of cpr")
"""Those that the other assembler mixes up."""


@pytest.fixture(scope="module")
def compiled() -> Callable[[str], CompiledKernel]:
    """compiled(name) -> a kernel for Hopper, with what the assembler was given and what it made."""

    @functools.cache
    def make(name: str) -> CompiledKernel:
        kernel, changes, options = KERNELS[name]
        return compile(source_of(kernel, changes), target=TARGET, options={"num_warps": 4, **sm90.EXACT, **options})

    return make


@pytest.mark.parametrize("name", KERNELS)
def test_words_are_kept_apart(name: str, compiled: Callable[[str], CompiledKernel], tmp_path: Path) -> None:
    """In the code that would be launched; whatever kernel, there are descriptors that step."""
    (tmp_path / "kernel.cubin").write_bytes(compiled(name).asm["cubin"])
    wrong, seen = mixed_words(tmp_path / "kernel.cubin")
    assert seen and not wrong


@pytest.mark.parametrize("name", SEEN)
def test_the_hazard_exists_and_is_seen(name: str, compiled: Callable[[str], CompiledKernel], tmp_path: Path) -> None:
    """In the code of the other assembler, which Triton would take; it knows the language one version before."""
    text = re.sub(r"(?m)^\.version .*", ".version 8.7", compiled(name).asm["ptx"])
    (tmp_path / "kernel.ptx").write_text(text)
    paths = [tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
    subprocess.run([FOLDER / "ptxas", "-arch=sm_90a", *paths], check=True, capture_output=True)
    assert mixed_words(tmp_path / "kernel.cubin")[0]


def test_it_is_chosen() -> None:
    """Whatever is compiled from now on, also by other modules of the process."""
    from triton.backends.nvidia.compiler import get_ptxas, get_ptxas_version

    assert Path(get_ptxas(90).path) == sm90.ASSEMBLER and get_ptxas(90).version == sm90.ASSEMBLER_VERSION
    assert f"release {sm90.ASSEMBLER_VERSION}" in get_ptxas_version(90)


@pytest.mark.parametrize(
    "version, message", [("99.9", "is of version 12.9, not of version 99.9"), (None, "is missing")]
)
def test_another_assembler_is_refused(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that is not there, or not the one that was looked at."""
    if version is None:
        monkeypatch.setattr(sm90, "ASSEMBLER", tmp_path / "ptxas-blackwell")
    else:
        monkeypatch.setattr(sm90, "ASSEMBLER_VERSION", version)
    with pytest.raises(RuntimeError, match=message):
        sm90.choose_assembler()
