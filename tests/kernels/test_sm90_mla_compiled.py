"""Latent attention's tile of groups of warps as the assembler makes it, without a GPU.

It is written in Gluon, which no interpreter runs; its bits are compared on a device, by the gate of latent attention.
"""

import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="compiles")

from hopper_source import TARGET, disassembled, latent_source, mixed_words  # noqa: E402
from triton.compiler import compile  # noqa: E402

from skyrl_isoexec.kernels.mla import grouped_sm90  # noqa: E402
from skyrl_isoexec.kernels.mla.warp_groups import PARTS, TILES, WHOLE  # noqa: E402
from skyrl_isoexec.kernels.numeric.sm90 import EXACT  # noqa: E402


@pytest.mark.parametrize("page_size, mode", [(64, PARTS.value), (128, WHOLE.value), (0, TILES.value)])
def test_tile(page_size: int, mode: int, tmp_path: Path) -> None:
    """It fits into shared memory, and the loop over blocks fetches nothing from local memory."""
    made = compile(latent_source(page_size, mode), target=TARGET, options={"num_warps": 4, **EXACT})
    assert made.metadata.shared <= 232_448
    (tmp_path / "kernel.cubin").write_bytes(made.asm["cubin"])
    assert not mixed_words(tmp_path / "kernel.cubin")[0]
    code = disassembled(tmp_path / "kernel.cubin")
    moves = [bool(re.match(r"(STL|LDL)", one)) for one in code]
    products = [i for i, one in enumerate(code) if one.startswith("HGMMA")]
    assert len(products) == 36 + 4 + 2 * 4  # scores, their sum, and values in either group
    assert sum(moves[i - 20 : i + 20] != [False] * 40 for i in products) == 0


def test_programs_of_a_decode_step() -> None:
    """One program for a request where that fills the multiprocessors, one for a partition where it does not."""
    assert [grouped_sm90.programs_of(n, 4, 132) for n in (1, 16, 33, 128, 132)] == [4, 4, 4, 0, 0]
    assert [grouped_sm90.programs_of(n, 64, 132) for n in (1, 2, 16)] == [64, 64, 8]
    assert grouped_sm90.programs_of(1, 1, 132) == 0
