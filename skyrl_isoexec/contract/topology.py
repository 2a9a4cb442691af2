"""Parallel degrees: what is claimed of each axis, and whether the degrees of both sides are among the proven ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from skyrl_isoexec.contract.claims import AXES
from skyrl_isoexec.contract.errors import Violation, join, shown
from skyrl_isoexec.contract.schema import Contract
from skyrl_isoexec.contract.values import is_integer

_ITSELF = {axis: axis for axis in AXES}
SIDES: dict[str, dict[str, str]] = {"trainer": _ITSELF, "engine": {**_ITSELF, "num": "dp"}}
"""Side -> key of `deployment.<side>` that is a degree -> its axis. Engines beside each other are data-parallel."""
GIVEN = {"trainer": ("tp", "pp", "dp", "ep"), "engine": ("tp", "num")}
"""Degrees that a side must say; any other is 1 where it is absent."""


def claims(contract: Contract) -> Iterator[Violation]:
    """Every axis has one claim; what is claimed of more than one degree is proven."""
    count = Counter(claim.axis for claim in contract.claims.topology)
    for axis in AXES:
        if count[axis] != 1:
            mend = (
                f"an axis that nothing uses is pinned to 1: TopologyClaim(axis='{axis}', kind='pinned', degrees=(1,))"
            )
            yield Violation("claims.topology", f"with {count[axis]} claims of {axis}", "one claim of each axis", mend)
    for i, claim in enumerate(contract.claims.topology):
        path = f"claims.topology[{i}]"
        if claim.kind == "pinned" and len(claim.degrees) > 1:
            yield Violation(f"{path}.degrees", shown(list(claim.degrees)), f"one degree: {claim.axis} is pinned")
        if claim.kind == "invariant" and not claim.proof:
            needed = f"records of gates that ran {claim.axis} at {_words(claim.degrees)}"
            yield Violation(f"{path}.proof", "empty", needed, "run the gate, or pin the axis")


def degrees(contract: Contract) -> Iterator[Violation]:
    """The degrees that both sides are started with are among the claimed ones."""
    claimed: dict[str, set[int]] = {}
    for claim in contract.claims.topology:
        claimed.setdefault(claim.axis, set(claim.degrees)).intersection_update(claim.degrees)
    for side, keys in SIDES.items():
        path = f"deployment.{side}"
        given = contract.deployment.get(side)
        if not isinstance(given, Mapping):
            found = "missing" if given is None else shown(given)
            yield Violation(path, found, f"a mapping with {', '.join(GIVEN[side])}")
            continue
        for key, axis in keys.items():
            field = join(path, key)
            if key not in given and key in GIVEN[side]:
                yield Violation(field, "missing", "a degree")
                continue
            degree = given.get(key, 1)
            if not is_integer(degree) or degree < 1:
                yield Violation(field, shown(degree), "a positive integer")
            elif axis in claimed and degree not in claimed[axis]:
                needed = f"{_words(claimed[axis])}, as claims.topology has it of {axis}"
                yield Violation(field, str(degree), needed, "prove the degree, or use a proven one")


def _words(degrees: tuple[int, ...] | set[int]) -> str:
    return " or ".join(str(degree) for degree in sorted(degrees)) or "no degree"
