"""Digests that say which part of a contract two processes share.

`semantic` is the function, `numerical_policy` everything that can change a bit, `deployment` what is proven not to.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from skyrl_isoexec.contract.canonical import spell
from skyrl_isoexec.contract.codec import plain
from skyrl_isoexec.contract.schema import Contract, Identities

PARTS: dict[str, tuple[str, ...]] = {
    "semantic": ("model", "cases"),
    "numerical_policy": ("schema_version", "model", "cases", "composition", "versions", "sources", "claims"),
    "deployment": ("deployment",),
}
"""Name of an identity -> the fields of a contract that it is the digest of."""


def identities(contract: Contract | None = None, /, **fields: Any) -> Identities:
    """Computed from a contract, whatever it says its identities are, or from the fields of one that has none yet.

    ContractError if the fields are not those of a contract.
    """
    if contract is None:
        contract = Contract(**fields)
    return Identities(**{name: _digest(contract, fields) for name, fields in PARTS.items()})


def seal(contract: Contract) -> Contract:
    """The same contract with its identities."""
    return dataclasses.replace(contract, identities=identities(contract))


def moves(field: str) -> tuple[str, ...]:
    """The identities that a field, given by its dotted name or the first word of it, is part of."""
    top = field.partition(".")[0].partition("[")[0]
    return tuple(name for name, fields in PARTS.items() if top in fields)


def _digest(contract: Contract, fields: tuple[str, ...]) -> str:
    return hashlib.sha256(spell({name: plain(getattr(contract, name)) for name in fields})).hexdigest()
