"""No field of a contract can change unnoticed: it is refused, or it moves the identity that it is part of."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_isoexec.contract import (
    Contract,
    ContractError,
    canonical,
    decode,
    diff,
    digest,
    identities,
    moves,
    plain,
    seal,
    validate,
)

PARTS = ("semantic", "numerical_policy", "deployment")
MOVED = {
    "model": {"semantic", "numerical_policy"},
    "cases": {"semantic", "numerical_policy"},
    "composition": {"numerical_policy"},
    "versions": {"numerical_policy"},
    "sources": {"numerical_policy"},
    "claims": {"numerical_policy"},
    "deployment": {"deployment"},
    "schema_version": {"numerical_policy"},
    "identities": set(),
}
"""Written out here, so that moving a field out of an identity by mistake is seen."""


def moved(a: Contract, b: Contract) -> set[str]:
    old, new = identities(a), identities(b)
    return {name for name in PARTS if getattr(old, name) != getattr(new, name)}


def field(path: tuple[str | int, ...]) -> str:
    """The dotted field that `diff` names: an array of words is one field, a key is one."""
    made = str(path[0])
    for step in path[1:]:
        made += f"[{step}]" if isinstance(step, int) else f".{step}" if step.isascii() else f"[{step!r}]"
    return made


def read(data: dict[str, Any]) -> Contract | None:
    """The contract, or None where it is refused."""
    try:
        return decode(canonical(data))
    except ContractError:
        return None


def look_at(contract: Contract, path: tuple[str | int, ...], data: dict[str, Any]) -> str:
    """What became of one changed field; fails if nothing noticed it."""
    changed = read(data)
    if changed is None:
        return "refused"
    with pytest.raises(ContractError, match=r"(^|\n)identities\."):
        validate(changed)
    assert moved(contract, changed) == MOVED[str(path[0])]
    if path[0] == "identities":
        (line,) = diff(contract, changed)
        assert line.startswith(f"{field(path)} is ")
        return "stale"
    resealed = seal(changed)
    assert resealed != contract and digest(resealed) != digest(contract)
    lines = diff(contract, resealed)
    assert len(lines) == 1 and field(path).startswith(lines[0].split(" is ")[0].split(" (of ")[0]), (path, lines)
    assert lines[0].endswith("it moves " + " and ".join(n for n in PARTS if n in MOVED[str(path[0])]))
    assert len(diff(resealed, contract)) == 1
    return "moved"


def others(value: Any) -> list[Any]:
    """Values near a value, of its type and of another."""
    if isinstance(value, bool):
        return [not value, int(value), None, ...]
    if isinstance(value, int):
        return [value + 1, bool(value), float(value), str(value), None, ...]
    if isinstance(value, str):
        return [value + "x", value[:-1] + "0", "", None, ...]
    return [0, False, "", {}, [], ...]


def test_every_field_of_every_part(contract, paths, edited):
    """Each leaf is changed, retyped and taken out; of entries of one shape some stand for the others."""
    outcomes: dict[str, set[str]] = {}
    apart = {"attention", "row_linear", "logprob"}
    alike = {i for i, entry in enumerate(contract.composition) if entry.impl.op not in apart}
    for path, value in paths:
        if path[0] == "composition" and path[1] in alike:
            continue
        for other in others(value):
            if type(other) is type(value) and other == value:
                continue
            outcomes.setdefault(str(path[0]), set()).add(look_at(contract, path, edited(*path, to=other)))
    assert outcomes.keys() == MOVED.keys()
    for part, seen in outcomes.items():
        once = {"schema_version": {"refused"}, "identities": {"refused", "stale"}}
        assert seen == once.get(part, {"refused", "moved"}), part


@settings(deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_value_anywhere(contract, paths, edited, data):
    """Any JSON in the place of any leaf is refused or moves what it must."""
    path, value = paths[data.draw(st.integers(0, len(paths) - 1))]
    other = data.draw(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6))
    if type(other) is not type(value) or other != value:
        look_at(contract, path, edited(*path, to=other))


@settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=5),
        st.none() | st.booleans() | st.integers(0, 9) | st.just({"a": 1}),
        max_size=4,
    )
)
def test_deployment_never_moves_the_policy(contract, deployment):
    changed = Contract(**{name: getattr(contract, name) for name in MOVED} | {"deployment": deployment})
    assert moved(contract, changed) == {"deployment"}


def test_moves_is_what_moves():
    for part, names in MOVED.items():
        assert set(moves(part)) == set(moves(f"{part}[0].x")) == set(moves(f"{part}.x")) == names


def test_identities_of_fields_alone(contract):
    fields = {name: getattr(contract, name) for name in MOVED if name != "identities"}
    assert identities(**fields) == identities(contract) == contract.identities
    fields["composition"] = fields["composition"][::-1]
    assert identities(**fields) == contract.identities
    assert set(plain(contract.identities)) == set(PARTS)
    with pytest.raises(ContractError, match="Contract.model"):
        identities(**{**fields, "model": None})
