"""A contract that keeps together by itself and is not what would be composed here is not verified."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from skyrl_isoexec.contract import Contract, Entry, StateClaim, Tolerance, TopologyClaim, seal, validate
from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.composition import against_installation, compose_contract, decoder_config


@pytest.fixture(scope="module")
def base() -> Contract:
    """The contract of the embedded default."""
    launch, cfg = compose(["+exec=isoexec"])
    return compose_contract(launch, cfg, decoder_config(launch))


def entries(contract: Contract, change: Callable[[Entry], Entry]) -> Contract:
    """The contract with each entry changed."""
    return dataclasses.replace(contract, composition=tuple(map(change, contract.composition)))


def claims(contract: Contract, **fields: Any) -> Contract:
    """The contract with other claims."""
    return dataclasses.replace(contract, claims=dataclasses.replace(contract.claims, **fields))


def impl(entry: Entry, **fields: Any) -> Entry:
    """The entry with another implementation."""
    return dataclasses.replace(entry, impl=dataclasses.replace(entry.impl, **fields))


def wide(claim: TopologyClaim, gate: str) -> TopologyClaim:
    """A claim that nobody has shown."""
    return dataclasses.replace(claim, kind="invariant", degrees=(1, 3, 1000), proof=(gate,))


HOLES: dict[str, Callable[[Contract], Contract]] = {
    "no versions": lambda c: dataclasses.replace(c, versions={}),
    "no sources": lambda c: dataclasses.replace(c, sources={}),
    "no constants": lambda c: entries(c, lambda e: dataclasses.replace(e, constants={})),
    "a constant of another type": lambda c: entries(
        c, lambda e: dataclasses.replace(e, constants={**e.constants, "kv_block": "banana"} if e.constants else {})
    ),
    "a file that is none, as implementation": lambda c: entries(
        c, lambda e: impl(e, id="attention.spec") if e.impl.op == "attention" else e
    ),
    "another version": lambda c: entries(c, lambda e: impl(e, version=99)),
    "unproven degrees": lambda c: claims(
        c, topology=tuple(wide(t, c.composition[0].gate) if t.axis == "sp" else t for t in c.claims.topology)
    ),
    "a tolerance": lambda c: claims(c, tolerances=(Tolerance(name="any", boundary="all", bound="any"),)),
    "a state that nothing invalidates": lambda c: claims(
        c,
        state=tuple(
            StateClaim(state="weights", invalidated_by=()) if s.state == "weights" else s for s in c.claims.state
        ),
    ),
    "a model without fields": lambda c: dataclasses.replace(c, model=dataclasses.replace(c.model, fields={})),
    "no environment": lambda c: dataclasses.replace(
        c, deployment={key: value for key, value in c.deployment.items() if key != "environment"}
    ),
}


@pytest.mark.parametrize("hole", HOLES)
def test_hole(hole: str, base: Contract) -> None:
    changed = seal(HOLES[hole](base))
    validate(changed)
    problems = against_installation(changed)
    assert problems, hole


def test_without_a_hole(base: Contract) -> None:
    assert against_installation(base) == []
