"""Comparison of what a process was told to be with what it read back of itself."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_isoexec.contract.errors import ContractError, Violation, shown
from skyrl_isoexec.contract.values import Scalar, is_scalar_or_none, same

_LONGEST = 4000
"""Characters of a value that are shown: two that differ only in their end must not look the same."""


def differences(expected: Mapping[str, Scalar | None], found: Mapping[str, Scalar | None], process: str) -> list[str]:
    """A line for each fact that is missing, unknown or other than the contract says, by name; empty if all are equal.

    True is not 1, and a value that is no scalar equals nothing. ContractError where nothing is expected: that would
    prove nothing.
    """
    if not expected:
        raise ContractError(Violation(process, "expected to have no facts at all", "compared with at least one"))
    lines = []
    for name in sorted(expected.keys() | found.keys(), key=str):
        wanted = shown(expected.get(name), _LONGEST)
        there = shown(found.get(name), _LONGEST)
        if name not in found:
            lines.append(f"{process}: {name} is not reported, the contract says {wanted}")
        elif name not in expected:
            lines.append(f"{process}: {name} is {there}, the contract has no such fact")
        elif not is_scalar_or_none(found[name]) or not same(expected[name], found[name]):
            lines.append(f"{process}: {name} is {there}, the contract says {wanted}")
    return lines
