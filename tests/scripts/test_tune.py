"""The table that tuning writes: what was not measured keeps its tile."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
A, B, C, D = ("swap 16 64 128 w4 s4 x1", "tma 64 64 128 w4 s3 x1", "tma 128 128 64 w4 s4 x1", "tma 128 256 64 w8 s3 x1")


@pytest.fixture(scope="module")
def tune():
    pytest.importorskip("triton")
    spec = importlib.util.spec_from_file_location("tune_sm90", ROOT / "scripts" / "tune_sm90.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(num_m: int, **times: float) -> dict:
    names = {"a": A, "b": B, "c": C, "d": D}
    tiles = {names[name]: {"ms": ms, "differing": 0} for name, ms in times.items()}
    return {"op": "linear", "n": 64, "k": 32, "leaves": 1, "m": num_m, "native_ms": 1.0, "tiles": tiles}


def test_a_part_of_the_rows_leaves_the_others(tune, tmp_path: Path) -> None:
    """One number of rows of a known shape, and one of a shape that "default" served."""
    path = tmp_path / "tiles.json"
    shapes = {"64 32 1": [[16, [A]], [256, [B]], [None, [D]]], "default": [[64, [A]], [None, [D]]]}
    path.write_text(json.dumps({"made": {"commit": "one"}, "shapes": shapes}))
    tune.write_table(path, [result(64, c=1.0, b=2.0), result(64, a=1.0) | {"n": 128}], {"commit": "two"})
    data = json.loads(path.read_text())
    assert data["shapes"]["64 32 1"] == [[16, [A]], [32, [B]], [64, [C]], [256, [B]], [None, [D]]]
    assert data["shapes"]["128 32 1"] == [[64, [A]], [None, [D]]] and data["shapes"]["default"] == shapes["default"]
    assert [made["commit"] for made in data["made"]] == ["one", "two"]


def test_a_tile_that_differs_or_failed_is_not_admitted(tune) -> None:
    """However quick it is."""
    found = result(16, b=2.0)
    found["tiles"] |= {A: {"ms": 1.0, "differing": 1}, C: {"error": "too large"}}
    assert tune.best(found) == [B]
