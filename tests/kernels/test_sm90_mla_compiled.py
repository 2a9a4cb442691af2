"""Latent attention's tile of groups of warps as the assembler makes it, without a GPU.

It is written in Gluon, which no interpreter runs; its bits are compared on a device, by the gate of latent attention.
"""

import re
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="compiles")

from hopper_source import TARGET, disassembled, latent_source, mixed_words  # noqa: E402
from triton.compiler import compile  # noqa: E402

from skyrl_isoexec.kernels.mla import grouped_sm90, kernel  # noqa: E402
from skyrl_isoexec.kernels.mla.items_sm90 import PARTS, TILES, WHOLE  # noqa: E402
from skyrl_isoexec.kernels.numeric.sm90 import EXACT  # noqa: E402
from skyrl_isoexec.schedule import Schedule  # noqa: E402

NUMBERS_IN_A_LOOP = 4
"""That the loop over blocks may fetch from local memory."""


@pytest.mark.parametrize("page_size, mode", [(64, PARTS.value), (128, WHOLE.value), (0, TILES.value)])
def test_tile(page_size: int, mode: int, tmp_path: Path) -> None:
    """It fits into shared memory, and the loops over blocks fetch next to nothing from local memory."""
    made = compile(latent_source(page_size, mode), target=TARGET, options={"num_warps": 4, **EXACT})
    assert made.metadata.shared <= 232_448
    (tmp_path / "kernel.cubin").write_bytes(made.asm["cubin"])
    assert not mixed_words(tmp_path / "kernel.cubin")[0]
    code = disassembled(tmp_path / "kernel.cubin")
    moves = [bool(re.match(r"(STL|LDL)", one)) for one in code]
    products = [i for i, one in enumerate(code) if one.startswith("HGMMA")]
    assert len(products) == 36 + 4 + 2 * 4  # scores, their sum, and values in either group
    for first, last in ((0, 3), (4, 7), (8, 47)):  # values of either group, and scores: in a loop over blocks each
        assert sum(moves[products[first] - 20 : products[last]]) <= NUMBERS_IN_A_LOOP


def test_programs_of_a_decode_step() -> None:
    """Partitions have programs of their own where requests are few; many requests, or much memory, have one each."""
    programs_of = grouped_sm90.programs_of
    assert [programs_of(n, 4, 20, 132) for n in (1, 16, 33, 128, 140, 264)] == [4, 4, 4, 1, 4, 0]
    assert [programs_of(n, 64, 20, 132) for n in (1, 2, 16)] == [64, 64, 8]
    assert programs_of(1, 1, 20, 132) == 0
    assert programs_of(128, 256, 20, 132) == 0


def test_the_tile_is_refused_for_other_keys() -> None:
    q, c = torch.zeros(2, 3, 96, dtype=torch.bfloat16), torch.zeros(2, 96, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"mla: the tile \(64, 12, 2\) holds no keys of 64 \+ 32"):
        kernel.forward(q, c, torch.tensor([0, 2]), 1.0, 64, Schedule(), kernel.GROUPED)
