"""Differences of two contracts, in sentences: the field, both values, and which identity the difference moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from skyrl_isoexec.contract.codec import plain
from skyrl_isoexec.contract.errors import join, shown
from skyrl_isoexec.contract.identity import PARTS, moves
from skyrl_isoexec.contract.schema import Contract, Entry
from skyrl_isoexec.contract.values import same

_LONGEST = 1000
_ABSENT = object()
_TOLD_APART_BY: dict[str, tuple[Callable[[Any], object], ...]] = {
    "cases": (lambda case: case.name,),
    "composition": (lambda entry: (entry.region, entry.cases), lambda entry: entry.region),
    "claims.topology": (lambda claim: claim.axis,),
    "claims.state": (lambda claim: claim.state,),
    "claims.tolerances": (lambda tolerance: tolerance.name,),
}
"""Field that is a set of objects -> what makes two of them the same one, the most telling first."""


def diff(a: Contract, b: Contract) -> list[str]:
    """One sentence for each field that differs; empty for equal contracts.

    Entries of the composition are compared with those of the same region and cases; their index is that of `a`. An
    array of words is one field. Identities are named only where nothing they are computed from differs.
    """
    lines: list[str] = []
    moved: set[str] = set()
    for field in dataclasses.fields(Contract):
        if field.name == "identities":
            continue
        names = moves(field.name)
        for path, left, right in _compare(field.name, getattr(a, field.name), getattr(b, field.name)):
            lines.append(f"{path} is {_words(left)} in the first and {_words(right)} in the second; "
                         f"it moves {' and '.join(names)}")  # fmt: skip
            moved |= set(names)
    for name in PARTS:
        left, right = (getattr(contract.identities, name, None) for contract in (a, b))
        if left != right and name not in moved:
            lines.append(f"identities.{name} is {_words(left)} in the first and {_words(right)} in the second, "
                         "of equal fields: it is not the digest of one of them")  # fmt: skip
    return lines


def _compare(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """(field, value in a, value in b) for the smallest fields that differ."""
    if same(a, b):
        return
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted(a.keys() | b.keys()):
            yield from _compare(join(path, key), a.get(key, _ABSENT), b.get(key, _ABSENT))
    elif dataclasses.is_dataclass(a) and type(a) is type(b):
        for field in dataclasses.fields(a):
            of = f" (of {' + '.join(a.region)})" if isinstance(a, Entry) else ""
            for found, left, right in _compare(join(path, field.name), getattr(a, field.name), getattr(b, field.name)):
                yield f"{found}{of}", left, right
    elif type(a) is tuple and type(b) is tuple and path in _TOLD_APART_BY:
        for i, left, right in _pairs(a, b, _TOLD_APART_BY[path]):
            yield from _compare(join(path, i), left, right)
    else:
        yield path, a, b


def _pairs(a: Sequence[Any], b: Sequence[Any], keys: Sequence[Callable[[Any], object]]) -> list[tuple[int, Any, Any]]:
    """(index, member of a, member of b) by the first key that is equal, what is left over in order."""
    left, right = list(enumerate(a)), list(enumerate(b))
    pairs = []
    for key in keys:
        for i, member in list(left):
            other = next((j for j, (_, candidate) in enumerate(right) if key(candidate) == key(member)), None)
            if other is not None:
                pairs.append((i, member, right.pop(other)[1]))
                left.remove((i, member))
    shared = min(len(left), len(right))
    pairs += [(i, member, other) for (i, member), (_, other) in zip(left, right, strict=False)]
    pairs += [(i, member, _ABSENT) for i, member in left[shared:]]
    pairs += [(j, _ABSENT, other) for j, other in right[shared:]]
    return sorted(pairs, key=lambda pair: pair[0])


def _words(value: Any) -> str:
    return "absent" if value is _ABSENT else shown(plain(value), _LONGEST)
