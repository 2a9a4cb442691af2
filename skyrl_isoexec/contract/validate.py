"""What only the whole contract can tell: one owner of every operator in every case, a proof of every claim, digests.

Nothing stops at the first violation: a refusal lists them all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator

from skyrl_isoexec.contract import topology
from skyrl_isoexec.contract.cases import CASE_NAMES, CASES
from skyrl_isoexec.contract.claims import STATES
from skyrl_isoexec.contract.codec import plain
from skyrl_isoexec.contract.errors import SEAL, ContractError, Violation, join, shown
from skyrl_isoexec.contract.identity import identities
from skyrl_isoexec.contract.schema import GATE, GATE_FORM, Contract, Entry

WHOLE_MODEL = "decoder"
"""The region of a gate that runs whole models, or the beginning of one of a kind of them (`decoder_moe`): it may admit
any implementation."""
FOLLOWS_WEIGHTS = ("kv_cache", "recurrent_state", "prefix_cache", "derived_weights")
"""States computed from weights: new weights make them unusable."""


def validate(contract: Contract) -> None:
    """ContractError with a line for every violation, or None: the contract keeps together."""
    if type(contract) is not Contract:
        raise ContractError(Violation("", shown(contract), "a Contract"))
    found = [violation for check in CHECKS for violation in check(contract)]
    if found:
        raise ContractError(*found)


def model(contract: Contract) -> Iterator[Violation]:
    """What the model says twice it says alike."""
    for name in ("family", "dtype"):
        needed = getattr(contract.model, name)
        found = contract.model.fields.get(name, needed)
        if found != needed:
            yield Violation(f"model.fields.{name}", shown(found), f"model.{name}, {needed!r}")


def cases(contract: Contract) -> Iterator[Violation]:
    """The cases are those of this release: each once, none changed."""
    names = [case.name for case in contract.cases]
    for i, case in enumerate(contract.cases):
        known = CASES[CASE_NAMES.index(case.name)]
        path = join("cases", i)
        if case.name in names[:i]:
            yield Violation(join(path, "name"), f"{case.name} again", "given once")
        for field in dataclasses.fields(case):
            found, needed = getattr(case, field.name), getattr(known, field.name)
            if found != needed:
                yield Violation(join(path, field.name), shown(plain(found)), f"{shown(plain(needed))} for {case.name}")
    for name in CASE_NAMES:
        if name not in names:
            yield Violation("cases", f"without {name}", "every case of this release", "use contract.CASES")


def partition(contract: Contract) -> Iterator[Violation]:
    """In every case every operator has one owner."""
    known = set(contract.model.ops)
    for i, entry in enumerate(contract.composition):
        for j, op in enumerate(entry.region):
            if op not in known:
                yield Violation(join(join(f"composition[{i}]", "region"), j), repr(op), "an operator of model.ops")
    for case in CASE_NAMES:
        for op in contract.model.ops:
            owners = [i for i, e in enumerate(contract.composition) if op in e.region and case in e.cases]
            if not owners:
                needed = f"one entry that owns {op} in {case}"
                yield Violation("composition", f"without an owner of {op} in {case}", needed)
            for i in owners[1:]:
                first = f"composition[{owners[0]}], {contract.composition[owners[0]].impl.id}, owns it"
                yield Violation(f"composition[{i}]", f"a second owner of {op} in {case}", "the only one", first)


def discharges(contract: Contract) -> Iterator[Violation]:
    """Where cases compute an operator otherwise, each of the entries says what proves them equal."""
    needed: dict[int, str] = {}
    for op in contract.model.ops:
        owners = {i: _way(entry) for i, entry in enumerate(contract.composition) if op in entry.region}
        if len(set(owners.values())) > 1:
            for i in owners:
                needed.setdefault(i, op)
    for i, op in sorted(needed.items()):
        if contract.composition[i].discharge is None:
            why = f"a gate's record: other cases compute {op} by another region, implementation or constants"
            yield Violation(f"composition[{i}].discharge", "None", why, "run the gate of the region in both ways")


def _way(entry: Entry) -> tuple[object, ...]:
    return entry.region, entry.impl, entry.constants


def gates(contract: Contract) -> Iterator[Violation]:
    """Records are well-formed, of the implementation's own arch, and of its own operator or of a whole model."""
    arches = {entry.impl.arch for entry in contract.composition}
    for i, entry in enumerate(contract.composition):
        own = {entry.impl.arch}
        yield from gate(f"composition[{i}].gate", entry.gate, own, {entry.impl.op, WHOLE_MODEL})
        if entry.discharge is not None:
            yield from gate(f"composition[{i}].discharge.ref", entry.discharge.ref, own)
    for i, claim in enumerate(contract.claims.topology):
        for j, ref in enumerate(claim.proof):
            yield from gate(f"claims.topology[{i}].proof[{j}]", ref, arches)


def gate(field: str, ref: str, arches: set[str], regions: set[str] | None = None) -> Iterator[Violation]:
    """What is wrong with one reference to a gate's record."""
    match = GATE.fullmatch(ref)
    if match is None:
        yield Violation(field, shown(ref), GATE_FORM)
        return
    if match["arch"] not in arches:
        yield Violation(field, shown(ref), f"a record of arch {' or '.join(sorted(arches))}")
    if regions is not None and _kind(match["region"]) not in regions:
        yield Violation(field, shown(ref), f"a record of region {' or '.join(sorted(regions))}")


def _kind(region: str) -> str:
    return WHOLE_MODEL if region.startswith(f"{WHOLE_MODEL}_") else region


def states(contract: Contract) -> Iterator[Violation]:
    """Every kept state has one claim, and new weights invalidate what was computed from the old."""
    claims = contract.claims.state
    count = Counter(claim.state for claim in claims)
    for state in STATES:
        if count[state] != 1:
            yield Violation("claims.state", f"with {count[state]} claims of {state}", "one claim of each state")
    for i, claim in enumerate(claims):
        if claim.state in FOLLOWS_WEIGHTS and "weight_sync" not in claim.invalidated_by:
            found = shown(list(claim.invalidated_by))
            yield Violation(
                f"claims.state[{i}].invalidated_by", found, f"with weight_sync: {claim.state} follows weights"
            )


def tolerances(contract: Contract) -> Iterator[Violation]:
    """A tolerance is told from the others by its name."""
    names = [tolerance.name for tolerance in contract.claims.tolerances]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield Violation(f"claims.tolerances[{i}].name", shown(name), "a name that no other tolerance has")


def stated(contract: Contract) -> Iterator[Violation]:
    """The identities are the digests of the fields."""
    if contract.identities is None:
        yield Violation("identities", "None", "digests of this contract", SEAL)
        return
    for name, needed in plain(identities(contract)).items():
        found = getattr(contract.identities, name)
        if found != needed:
            yield Violation(f"identities.{name}", found, f"{needed}, the digest of the fields", SEAL)


CHECKS: tuple[Callable[[Contract], Iterator[Violation]], ...] = (
    model,
    cases,
    partition,
    discharges,
    gates,
    topology.claims,
    topology.degrees,
    states,
    tolerances,
    stated,
)
