"""Canonical JSON: one spelling of plain data. Sorted keys, no spaces, UTF-8, no floats, no key given twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from skyrl_isoexec.contract.errors import ContractError, Violation, dotted, shown
from skyrl_isoexec.contract.values import is_scalar, is_scalar_or_none


class _Word:
    """A number that JSON may hold and a contract may not, as it was written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class _Twice(dict):
    """An object with keys given more than once."""

    keys_twice: list[str]


def canonical(data: Any) -> bytes:
    """The one spelling of dicts, lists, text, integers, true, false and None; ContractError names what is neither."""
    _refuse(data)
    return spell(data)


def spell(data: Any) -> bytes:
    """`canonical` for data that the schema has looked at: it holds nothing that has to be refused."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def parse(raw: bytes | str) -> Any:
    """Plain data of JSON; ContractError for wrong UTF-8, wrong JSON, a float, NaN, Infinity or a key given twice.

    Other spellings than the canonical one are read: `spelled` refuses those.
    """
    if type(raw) not in (bytes, str):
        raise ContractError(Violation("", f"a {type(raw).__name__}", "bytes or text of JSON"))
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        data = json.loads(text, parse_float=_Word, parse_constant=_Word, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ContractError(Violation("", f"not readable ({error})", "JSON in UTF-8, whole")) from None
    _refuse(data)
    return data


def spelled(raw: bytes | str, data: Any) -> None:
    """ContractError, which names the place, unless `raw` is what `spell` makes of `data`."""
    found = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    needed = spell(data)
    if found == needed:
        return
    at = next((i for i, (a, b) in enumerate(zip(found, needed, strict=False)) if a != b), min(len(found), len(needed)))
    there, wanted = (shown(part[at : at + 24]) for part in (found, needed))
    mend = "write it with contract.encode"
    raise ContractError(Violation("", f"not canonical JSON: {there} at byte {at}", f"{wanted} there", mend))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    twice, keys = _Twice(made), [key for key, _ in pairs]
    twice.keys_twice = sorted({key for key in keys if keys.count(key) > 1})
    return twice


def _refuse(data: Any) -> None:
    try:
        found = list(_foreign(data, ()))
    except RecursionError:
        found = [Violation("", "nested too deeply", "a few levels deep")]
    if found:
        raise ContractError(*found)


def _foreign(value: Any, path: tuple[str | int, ...]) -> Iterator[Violation]:
    """What canonical JSON cannot hold."""
    if type(value) in (dict, _Twice):
        for key in getattr(value, "keys_twice", ()):
            yield Violation(dotted((*path, key)), "given more than once", "given once")
        for key, item in value.items():
            if type(key) is not str or not is_scalar(key):
                mend = f"its key {shown(key)} is not"
                yield Violation(dotted(path), shown(value), "an object whose keys are text", mend)
            else:
                yield from _foreign(item, (*path, key))
    elif type(value) is list:
        for i, item in enumerate(value):
            yield from _foreign(item, (*path, i))
    elif isinstance(value, (_Word, float)):
        mend = "write a constant as contract.float_bits does"
        yield Violation(dotted(path), repr(value), "text, an integer, true, false or null", mend)
    elif not is_scalar_or_none(value):
        needed = "text that UTF-8 can hold, a float's bits, an integer of 64 bits, true, false or null"
        yield Violation(dotted(path), shown(value), needed)
