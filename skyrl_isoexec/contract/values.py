"""Values that a contract may hold: text, integers, true and false, and mappings of them that nobody can change.

A float has no one spelling, so a float constant is its bit pattern as text: `float_bits`, `from_bits`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from skyrl_isoexec.contract.errors import ContractError, Violation, shown

Scalar = str | int | bool
"""Type hint of a leaf; a mapping may also allow None."""

FLOAT_MARK = "f64:"
_BITS = re.compile(r"f64:[0-9a-f]{16}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1


def float_bits(x: float) -> str:
    """The bits of a float as "f64:" and 16 hex digits; ContractError for anything but a float and for NaN."""
    if type(x) is not float or math.isnan(x):
        raise ContractError(Violation("a constant", shown(x), "a float that is a number", "use float(...) first"))
    return FLOAT_MARK + struct.pack(">d", x).hex()


def from_bits(bits: str) -> float:
    """The inverse of `float_bits`; ContractError for any other text."""
    if not is_scalar(bits) or not isinstance(bits, str) or not bits.startswith(FLOAT_MARK):
        raise ContractError(Violation("a constant", shown(bits), 'the bits of a number: "f64:" and 16 hex digits'))
    return struct.unpack(">d", bytes.fromhex(bits.removeprefix(FLOAT_MARK)))[0]


def is_integer(value: object) -> bool:
    """An int of 64 bits; True and False are none."""
    return type(value) is int and _SMALLEST <= value <= _LARGEST


def is_scalar(value: object) -> bool:
    """Text that UTF-8 can hold, an integer, true or false; text that begins as a float's bits is the bits of one."""
    if type(value) is not str:
        return type(value) is bool or is_integer(value)
    if value.startswith(FLOAT_MARK):
        return bool(_BITS.fullmatch(value)) and not math.isnan(struct.unpack(">d", bytes.fromhex(value[4:]))[0])
    return value.isascii() or _SURROGATE.search(value) is None


def is_scalar_or_none(value: object) -> bool:
    """`is_scalar`, or None."""
    return value is None or is_scalar(value)


def is_text(value: object) -> bool:
    """A str that UTF-8 can hold and that is not empty."""
    return type(value) is str and value != "" and is_scalar(value)


def is_sha256(value: object) -> bool:
    """64 lowercase hex digits."""
    return type(value) is str and _SHA256.fullmatch(value) is not None


def same(a: object, b: object) -> bool:
    """Equality that does not take True for 1, inside mappings too."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return len(a) == len(b) and all(key in b and same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


class FrozenMapping(Mapping[str, Any]):
    """A mapping in order of its keys, whose inner mappings are frozen too: equal by `same`, hashable, picklable."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        frozen = {k: FrozenMapping(v) if isinstance(v, Mapping) else v for k, v in sorted(items.items())}
        object.__setattr__(self, "_items", MappingProxyType(frozen))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a {type(self).__name__} cannot be changed: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a {type(self).__name__} cannot be changed: {name}")

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return same(self, other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMapping, (dict(self._items),)

    def __repr__(self) -> str:
        return repr(dict(self._items))
