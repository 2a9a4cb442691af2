"""`isoexec bench gdn`: what it counts, and that it gives no ratio without both arms."""

import argparse
from types import ModuleType

import pytest
import torch

from skyrl_isoexec.bench import gdn
from skyrl_isoexec.bench.commands import add_parser
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads

HEADS = GdnHeads(num_key_heads=16, num_value_heads=32, key_width=128, value_width=128)
RECURRENT = 32 * 128 * 128 * 4 * 2
"""Bytes of the stock state, read and written."""


def test_bytes_of_a_step_grow_with_the_row_and_stay_below_the_stock_state() -> None:
    sizes = [gdn.step_bytes(HEADS, row) for row in range(64)]
    assert sizes[:15] == sorted(sizes[:15]) and sizes[63] > sizes[62]
    assert max(sizes[:63]) < 0.6 * RECURRENT and sum(sizes) / 64 < 0.45 * RECURRENT


def test_no_ratio_without_the_stock_arm() -> None:
    row = gdn.Row(work="train", shape="1x8", operands=[], ours={"gdn": print}, native="no such module", num_bytes=0)
    text = gdn.line("whole", row, {"gdn": 1.5, "native": "not installed: no such module"}, 0.1)
    assert "ratio     -" in text and "not installed: no such module" in text
    assert "ratio  0.50" in gdn.line("whole", row, {"gdn": 1.5, "native": 3.0}, 0.1)


def test_a_refusal_is_lifted_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    name, variable = gdn.LIFTED
    module = ModuleType(name)
    monkeypatch.setattr(gdn, "_import", lambda wanted: {name: module}[wanted])
    assert variable in gdn.lift_refusal() and "fla-core 0.6.0" in gdn.lift_refusal()
    setattr(module, variable, False)
    assert gdn.lift_refusal() is None and getattr(module, variable) is True
    monkeypatch.setattr(gdn, "_import", lambda wanted: f"{wanted}: no such module")
    assert "no such module" in gdn.lift_refusal()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_it_refuses_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    for more, said in (
        ([], "no CUDA device"),
        (["--heads", *gdn.HEADS, "--work", *gdn.WORK], "no CUDA device"),
        (["--heads", "third", "--work", "rest"], "unknown ['third', 'rest']"),
    ):
        arguments = parser.parse_args(["bench", "gdn", *more])
        assert arguments.run(arguments) == 2 and said in capsys.readouterr().err
