"""Attention's tile of long prefills as the assembler makes it, without a GPU.

It is written in Gluon, which no interpreter runs; its bits are compared on a device, by the gate of attention.
"""

import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="compiles")

from hopper_source import TARGET, disassembled, long_prefill_source, mixed_words  # noqa: E402
from triton.compiler import compile  # noqa: E402

from skyrl_isoexec.kernels.attention import kernel  # noqa: E402
from skyrl_isoexec.kernels.numeric.sm90 import EXACT  # noqa: E402

REGISTERS_IN_A_LOOP = 4
"""Numbers that the loop over blocks may fetch from local memory, of some three hundred instructions."""
EXPONENTIALS_MEANWHILE = 28
"""Of a thread's 32 in a block, those that the assembler leaves before the wait for the values of the last block."""


@pytest.mark.parametrize("head_dim, page_size", [(64, 64), (128, 0), (128, 64), (256, 64)])
def test_a_long_prefill(head_dim: int, page_size: int, tmp_path: Path) -> None:
    """Exponentials of a block are taken while values of the last are; nothing spills but where a partition ends."""
    is_held = head_dim <= kernel.HELD
    source = long_prefill_source(head_dim, page_size, kernel.stages(head_dim), is_held)
    made = compile(source, target=TARGET, options={"num_warps": 4, **EXACT})
    assert made.metadata.shared <= 232_448
    ptx = made.asm["ptx"]
    assert ptx.count("wgmma.wait_group.sync.aligned \t1;") + ptx.count("wgmma.wait_group.sync.aligned 1;") == 2
    (tmp_path / "kernel.cubin").write_bytes(made.asm["cubin"])
    assert not mixed_words(tmp_path / "kernel.cubin")[0]
    code = disassembled(tmp_path / "kernel.cubin")
    moves = [bool(re.match(r"(STL|LDL)", one)) for one in code]
    if is_held:
        assert not any(moves)
    waits = [i for i, one in enumerate(code) if re.match(r"WARPGROUP.DEPBAR.LE gsb0, 0x1\b", one)]
    assert len(waits) == 2  # one for each group of warps
    for at in waits:
        products = [i for i in range(at - 300, at) if code[i].startswith("HGMMA")]
        assert len(products) >= 8 and sum(moves[products[0] : at]) <= REGISTERS_IN_A_LOOP
        values_read = next(i for i in range(at, len(code)) if re.match(r"WARPGROUP.DEPBAR.LE gsb0, 0x0\b", code[i]))
        meanwhile = code[at:values_read]
        assert sum(one.startswith("MUFU.EX2") for one in meanwhile) >= EXPONENTIALS_MEANWHILE
        assert not any(one.startswith("F2F.") for one in code)  # roundings one by one, as slow as exponentials
