"""The one error of a contract: everything that was found wrong at once, a line each, with the dotted field."""

from __future__ import annotations

import re
from typing import NamedTuple

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.\-/@+]+")
_LONGEST = 120
SEAL = "build it with `isoexec contract build OVERRIDE ...`, or in Python with contract.seal"
"""How a contract gets the identities that belong to its fields."""


class Violation(NamedTuple):
    """One thing that is wrong: which field, what it is, what it must be, and what to do where that is known."""

    field: str
    found: str
    needed: str
    mend: str = ""

    def __str__(self) -> str:
        line = f"{self.field or 'the contract'} is {self.found}; it must be {self.needed}"
        return f"{line}; {self.mend}" if self.mend else line

    def within(self, path: str) -> Violation:
        """The same violation, seen from the object that holds the field's owner at `path`."""
        dot = "" if not path or not self.field or self.field.startswith("[") else "."
        return self._replace(field=f"{path}{dot}{self.field}")


class ContractError(ValueError):
    """A contract was refused; `str` has one line for each violation, and `violations` has them as data."""

    root: str = ""
    """Name of the class that refused to be made; a reader of a whole contract puts the path there instead."""

    def __init__(self, *violations: Violation | str) -> None:
        super().__init__(*violations)

    @property
    def violations(self) -> tuple[Violation | str, ...]:
        """What was found, in the order of the fields; a str is a line that belongs to no field."""
        return self.args

    def __str__(self) -> str:
        lines = (v.within(self.root) if isinstance(v, Violation) else v for v in self.args)
        return "\n".join(str(line) for line in lines)


def join(path: str, step: str | int) -> str:
    """The dotted field of a key or an index below `path`; a key that is no plain word is quoted."""
    if isinstance(step, int):
        return f"{path}[{step}]"
    step = step if _PLAIN_KEY.fullmatch(step) else f"[{step!r}]"
    return f"{path}.{step}" if path and not step.startswith("[") else f"{path}{step}"


def dotted(steps: tuple[str | int, ...]) -> str:
    """The dotted field of keys and indices from the contract's top."""
    path = ""
    for step in steps:
        path = join(path, step)
    return path


def shown(value: object, longest: int = _LONGEST) -> str:
    """repr of a value on one line, cut where it is longer than `longest`."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, an object that holds itself
        text = f"a {type(value).__name__} that cannot be shown"
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"
