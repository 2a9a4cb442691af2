"""Field checks of the schema: each looks at one field of a dataclass being made; all that is wrong is raised at once.

A tuple that is a set has one order, into which it is put here: then equal meaning is equal bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_isoexec.contract.errors import ContractError, Violation, join, shown
from skyrl_isoexec.contract.values import FrozenMapping, is_integer, is_sha256, is_text

_DEEPEST = 8


def either(options: Sequence[str]) -> str:
    """Words for "one of these"."""
    return options[0] if len(options) == 1 else f"one of {', '.join(options)}"


class Check:
    """Collects the violations of `owner`'s fields; `done` raises them."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.found: list[Violation] = []

    def refuse(self, field: str, value: object, needed: str, mend: str = "") -> None:
        """Note that `field` holds `value`."""
        self.found.append(Violation(field, shown(value), needed, mend))

    def that(self, name: str, good: Callable[[Any], bool], needed: str, mend: str = "") -> None:
        """The field satisfies `good`."""
        value = getattr(self.owner, name)
        if not good(value):
            self.refuse(name, value, needed, mend)

    def text(self, *names: str) -> None:
        """Text that is not empty."""
        for name in names:
            self.that(name, is_text, "text that is not empty")

    def match(self, name: str, pattern: str, needed: str) -> None:
        """Text of a form."""
        self.that(name, lambda v: is_text(v) and re.fullmatch(pattern, v) is not None, needed)

    def sha256(self, *names: str) -> None:
        """64 lowercase hex digits."""
        for name in names:
            self.that(name, is_sha256, "a SHA-256 in 64 lowercase hex digits")

    def one_of(self, name: str, options: Sequence[str]) -> None:
        """A member of a closed list."""
        self.that(name, lambda v: type(v) is str and v in options, either(options))

    def positive(self, name: str) -> None:
        """An integer of at least 1, not a bool."""
        self.that(name, lambda v: is_integer(v) and v >= 1, "a positive integer")

    def flag(self, name: str) -> None:
        """A bool, not an int."""
        self.that(name, lambda v: type(v) is bool, "true or false")

    def instance(self, name: str, kind: type, optional: bool = False) -> None:
        """Exactly a dataclass of the schema, or None where that is allowed."""
        self.that(name, lambda v: type(v) is kind or (optional and v is None), f"of class {kind.__name__}")

    def items(
        self,
        name: str,
        good: Callable[[Any], bool],
        needed: str,
        *,
        order: Callable[[Any], Any] | None = None,
        unique: bool = True,
        empty: bool = False,
    ) -> None:
        """A tuple of good values, put in `order`; without duplicates where `unique`, with none at all where `empty`."""
        value = getattr(self.owner, name)
        if type(value) is not tuple:
            return self.refuse(name, value, f"a tuple, each of it {needed}")
        bad = [i for i, item in enumerate(value) if not good(item)]
        for i in bad:
            self.refuse(join(name, i), value[i], needed)
        if bad:
            return
        if not value and not empty:
            self.refuse(name, value, f"at least one, each of it {needed}")
        for i, item in enumerate(value):
            if unique and item in value[:i]:
                self.refuse(join(name, i), item, "given once", f"{join(name, value.index(item))} is the same")
        if order is not None:
            object.__setattr__(self.owner, name, tuple(sorted(value, key=order)))

    def chosen(self, name: str, options: Sequence[str], *, empty: bool = False) -> None:
        """A tuple of members of a closed list, put in the list's order."""
        self.items(name, lambda v: type(v) is str and v in options, either(options), order=options.index, empty=empty)

    def mapping(self, name: str, good: Callable[[Any], bool], needed: str, *, nested: bool = False) -> None:
        """A mapping from text to good values, which becomes a FrozenMapping; of such mappings where `nested`."""
        value = getattr(self.owner, name)
        before = len(self.found)
        self._mapping(name, value, good, needed, _DEEPEST if nested else 1)
        if len(self.found) == before:
            object.__setattr__(self.owner, name, FrozenMapping(value))

    def _mapping(self, path: str, value: Any, good: Callable[[Any], bool], needed: str, depth: int) -> None:
        if not isinstance(value, Mapping):
            return self.refuse(path, value, f"a mapping from text to {needed}")
        for key, item in value.items():
            if not is_text(key):
                self.refuse(path, value, "a mapping whose keys are text that is not empty", f"its key {shown(key)}")
            elif isinstance(item, Mapping) and depth > 1:
                self._mapping(join(path, key), item, good, needed, depth - 1)
            elif not good(item):
                self.refuse(join(path, key), item, needed)

    def done(self) -> None:
        """ContractError with all that was found, if anything was."""
        if self.found:
            error = ContractError(*self.found)
            error.root = type(self.owner).__name__
            raise error
