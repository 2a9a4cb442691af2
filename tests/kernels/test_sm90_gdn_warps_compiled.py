"""The recurrence of the gated delta rule in Gluon as the assembler makes it, without a GPU.

No interpreter runs Gluon; bits are compared with those of `triton_recur.py` on a device, by `tests/gpu/test_gdn.py`.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="compiles")

from hopper_source import TARGET, disassembled, gluon_source_of  # noqa: E402
from triton.compiler import CompiledKernel, compile  # noqa: E402

from skyrl_isoexec.kernels.gdn_cpr import kernel, warp_recur  # noqa: E402
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads  # noqa: E402
from skyrl_isoexec.kernels.numeric.gdn_proof import NARROW  # noqa: E402
from skyrl_isoexec.kernels.numeric.sm90 import EXACT  # noqa: E402


def made(
    function: triton.JITFunction, split: kernel.Split, widths: tuple[int, int], **changes: object
) -> CompiledKernel:
    """A kernel for heads of these widths, with a split made to fit."""
    heads = GdnHeads(num_key_heads=2, num_value_heads=4, key_width=widths[0], value_width=widths[1])
    module, columns, options = kernel.recurrence(heads, split)
    assert module is warp_recur
    changes |= {"DK": widths[0], "DV": widths[1], "BV": columns}
    constants = {name: options.pop(name) for name in list(options) if name in function.arg_names}
    assert widths[1] % columns == 0
    return compile(gluon_source_of(function, constants | changes), target=TARGET, options=options | EXACT)


def counted(compiled: CompiledKernel, folder: Path) -> Counter[str]:
    """Instructions by name."""
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    return Counter(re.split(r"[.;\s]", code)[0] for code in disassembled(folder / "kernel.cubin"))


@pytest.mark.parametrize("is_paged", [False, True])
def test_a_row_of_a_chunk_stays_in_registers(is_paged: bool, tmp_path: Path) -> None:
    """Of a thread's 128 numbers: products, trees and sums once each, nothing between threads, nearly no spills."""
    lanes, columns, *_ = kernel.SCAN
    found = counted(made(warp_recur.scan, kernel.SCAN, (128, 128), PAGED=is_paged), tmp_path)
    own = 128 * columns // lanes
    assert found["FFMA"] == own and found["FMUL"] - 3 * own < 10
    assert found["FADD"] - 2 * (own - columns) < 10 * columns
    assert found["SHFL"] == 2 * columns * (lanes.bit_length() - 1)
    assert found["LDL"] + found["STL"] < 10


def test_a_step_stays_in_registers(tmp_path: Path) -> None:
    """A state is read and written in whole vectors, and what is written has not left its thread."""
    compiled = made(warp_recur.step, kernel.STEP, (128, 128))
    found = counted(compiled, tmp_path)
    assert not found["LDL"] + found["STL"]
    lanes, columns, *_ = kernel.STEP
    assert len(re.findall(rf"st\.global\.v{columns}\.b32", compiled.asm["ptx"])) == 128 // lanes


@pytest.mark.parametrize("widths", NARROW)
@pytest.mark.parametrize("function, split", [(warp_recur.scan, kernel.SCAN), (warp_recur.step, kernel.STEP)])
def test_narrow_heads(function: triton.JITFunction, split: kernel.Split, widths: tuple[int, int]) -> None:
    """A split is cut to what heads hold."""
    made(function, split, widths, C=16)
