"""What a process read back of itself is compared with what the contract says: nothing more, nothing less."""

import pytest

from skyrl_isoexec.contract import ContractError, differences

EXPECTED = {"kernel.attention.function": "y", "degree.tp": 1, "numeric.flush": False, "environment.X": None}


def test_equal():
    assert differences(EXPECTED, dict(reversed(EXPECTED.items())), "trainer rank 0") == []


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("kernel.attention.function", "x", "kernel.attention.function is 'x', the contract says 'y'"),
        ("degree.tp", True, "degree.tp is True, the contract says 1"),
        ("degree.tp", 1.0, "degree.tp is 1.0, the contract says 1"),
        ("degree.tp", "1", "degree.tp is '1', the contract says 1"),
        ("numeric.flush", 0, "numeric.flush is 0, the contract says False"),
        ("numeric.flush", None, "numeric.flush is None, the contract says False"),
        ("environment.X", "", "environment.X is '', the contract says None"),
        ("environment.X", ..., "environment.X is not reported, the contract says None"),
        ("surplus", None, "surplus is None, the contract has no such fact"),
    ],
)
def test_one_difference(name, value, line):
    found = {k: v for k, v in {**EXPECTED, name: value}.items() if v is not ...}
    assert differences(EXPECTED, found, "engine rank 0") == [f"engine rank 0: {line}"]


def test_all_at_once_and_in_order():
    lines = differences(EXPECTED, {"z": 1, "a": 2}, "p")
    assert [line.split()[1] for line in lines] == sorted([*EXPECTED, "a", "z"])


def test_a_value_that_is_no_scalar_equals_nothing():
    for wrong in ([1], 0.5, float("nan"), (1,), b"y", {"a": 1}):
        assert len(differences({"x": wrong}, {"x": wrong}, "p")) == 1


def test_long_values_that_differ_at_the_end_look_different():
    (line,) = differences({"x": "a" * 500 + "b"}, {"x": "a" * 500 + "c"}, "p")
    assert "ab'" in line and "ac'" in line


def test_nothing_expected_proves_nothing():
    for found in ({}, {"x": 1}):
        with pytest.raises(ContractError, match="no facts at all"):
            differences({}, found, "engine rank 0")
