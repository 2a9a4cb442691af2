"""A contract as bytes and back. Both runtimes receive the same bytes; `decode` takes no others than `encode` writes."""

from __future__ import annotations

import dataclasses
import hashlib
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from skyrl_isoexec.contract.canonical import parse, spell, spelled
from skyrl_isoexec.contract.errors import SEAL, ContractError, Violation, dotted, shown
from skyrl_isoexec.contract.schema import Contract

_UNREAD = object()


def plain(value: Any) -> Any:
    """Dicts, lists and scalars of a contract, of a part of one, or of a tuple or mapping of parts."""
    if value is None or type(value) in (str, int, bool):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value]


def encode(contract: Contract) -> bytes:
    """Canonical JSON; ContractError for a contract without identities."""
    _sealed(contract)
    return spell(plain(contract))


def digest(contract: Contract) -> str:
    """SHA-256 of `encode`; ContractError as there."""
    return hashlib.sha256(encode(contract)).hexdigest()


def decode(raw: bytes | str) -> Contract:
    """The contract whose `encode` is `raw`; else ContractError with a line for each field that is wrong.

    Refused are unknown and missing keys, wrong types and forms, and any spelling but the canonical one. Whether the
    contract keeps what it promises is `validate`'s to say.
    """
    data = parse(raw)
    problems: list[Violation] = []
    made = _read(Contract, data, (), problems)
    if problems:
        raise ContractError(*problems)
    _sealed(made)
    spelled(raw, plain(made))
    return made


def _sealed(contract: Contract) -> None:
    if type(contract) is not Contract:
        raise ContractError(Violation("", shown(contract), "a Contract"))
    if contract.identities is None:
        raise ContractError(Violation("identities", "None", "digests of this contract", SEAL))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read(hint: Any, value: Any, path: tuple[str | int, ...], problems: list[Violation]) -> Any:
    """`value` as the type hint wants it. Leaves are looked at by the dataclass that holds them."""
    if get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint):
        rest = [arg for arg in get_args(hint) if arg is not type(None)]
        return None if value is None else _read(rest[0], value, path, problems) if len(rest) == 1 else value
    if dataclasses.is_dataclass(hint):
        return _read_object(hint, value, path, problems)
    if get_origin(hint) is not tuple:
        return value
    if type(value) is not list:
        problems.append(Violation(dotted(path), shown(value), "an array"))
        return _UNREAD
    items = tuple(_read(get_args(hint)[0], item, (*path, i), problems) for i, item in enumerate(value))
    return _UNREAD if any(item is _UNREAD for item in items) else items


def _read_object(cls: Any, value: Any, path: tuple[str | int, ...], problems: list[Violation]) -> Any:
    if type(value) is not dict:
        problems.append(Violation(dotted(path), shown(value), "an object"))
        return _UNREAD
    hints = _hints(cls)
    keys = ", ".join(sorted(hints))
    for key in sorted(value.keys() - hints.keys()):
        problems.append(Violation(dotted((*path, key)), "an unknown key", f"absent; the keys are {keys}"))
    for key in sorted(hints.keys() - value.keys()):
        problems.append(Violation(dotted((*path, key)), "missing", f"given; the keys are {keys}"))
    read = {key: _read(hints[key], value[key], (*path, key), problems) for key in hints if key in value}
    if value.keys() != hints.keys() or any(item is _UNREAD for item in read.values()):
        return _UNREAD
    try:
        made = cls(**read)
    except ContractError as error:
        problems.extend(v.within(dotted(path)) for v in error.violations if isinstance(v, Violation))
        return _UNREAD
    for key, given in read.items():  # all that making it may change is the order of a tuple
        kept = getattr(made, key)
        if type(kept) is tuple and kept != given:
            found = f"in another order: {shown(plain(given))}"
            problems.append(Violation(dotted((*path, key)), found, shown(plain(kept)), "arrays have one order"))
    return made
