"""What a process really computes with: read back from the functions it would call, and by computing.

Facts are flat: a dotted name and a string, an integer or a boolean. Nothing is taken from what was asked for.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from skyrl_isoexec.kernels.bundle import LEAVED, MAIN, SCHEDULED, Kernels, owners, underlying
from skyrl_isoexec.kernels.numeric.threads import everywhere
from skyrl_isoexec.kernels.selection import CONSTANT_OPS
from skyrl_isoexec.kernels.sources import PACKAGE, import_digest, source_digest
from skyrl_isoexec.schedule import Schedule


class WitnessError(RuntimeError):
    """Functions of one process that do not belong together."""


def bound(kernels: Kernels) -> dict[str, str]:
    """For each operator, "kernel.<op>.function": module and name of its main function, and "kernel.<op>.source": the
    digest, taken now, of the file that function came from and of all that it imports.

    WitnessError if another function of an operator is not the one that the main function's module has.
    """
    facts = {}
    owned = owners(kernels.impls)
    for op, main in sorted((op, MAIN[op]) for op in kernels.impls):
        function = underlying(getattr(kernels, main))
        module = inspect.getmodule(function)
        own = getattr(module, main, None) is function  # otherwise the fact itself differs
        for name in (name for name, owner in owned.items() if owner == op and own):
            if (found := underlying(getattr(kernels, name))) is not getattr(module, name, None):
                raise WitnessError(f"kernels.{name} is {named(found)}, not the one of {module.__name__}")
        facts[f"kernel.{op}.function"] = named(function)
        facts[f"kernel.{op}.source"] = _source(function)
    return facts


def _source(function: Callable) -> str:
    """Digest of a function's file and of what that imports; of the file alone where it is none of a kernel package."""
    file = inspect.getsourcefile(function)
    if file is None or not Path(file).is_file():
        return "unknown"
    path = Path(file).resolve()
    package = path.parents[2]
    return import_digest(path, package) if package.name == PACKAGE.name else source_digest(path)


def named(function: Callable) -> str:
    """module.name of a function."""
    return f"{function.__module__}.{function.__qualname__}"


def _bound_arguments(function: Callable) -> dict[str, object]:
    """Keyword arguments of every partial around a function."""
    found: dict[str, object] = {}
    while function is not None:
        if isinstance(function, partial):
            found = function.keywords | found
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
    return found


def constants(kernels: Kernels) -> dict[str, int]:
    """{"constant.<name>": value} of the numbers bound into the functions of the chosen operators.

    WitnessError where two functions have different ones, or one has none.
    """
    found: dict[str, int] = {}

    def add(owner: str, name: str, value: object) -> None:
        if found.setdefault(name, value) != value:
            raise WitnessError(f"kernels.{owner} has {name} = {value}, another has {found[name]}")

    owned = owners(kernels.impls)
    for owner in (name for name in SCHEDULED if name in owned):
        schedule = _bound_arguments(getattr(kernels, owner)).get("schedule")
        if not isinstance(schedule, Schedule):
            raise WitnessError(f"kernels.{owner} is bound to no schedule")
        for field in dataclasses.fields(schedule):
            add(owner, field.name, getattr(schedule, field.name))
    for owner in (name for name in LEAVED if name in owned):
        add(owner, "num_leaves", _bound_arguments(getattr(kernels, owner)).get("num_leaves"))
    for field in dataclasses.fields(kernels.schedule):
        add("schedule", field.name, getattr(kernels.schedule, field.name))
    return {
        f"constant.{name}": value
        for name, value in found.items()
        if name not in CONSTANT_OPS or kernels.impls.keys() & set(CONSTANT_OPS[name])
    }


def numeric() -> dict[str, str | int | bool]:
    """How the arithmetic of all threads of this process's work rounds, found by computing, and how many there are."""
    flushes, directions = everywhere(_flushes), set(everywhere(_rounding))
    return {
        "numeric.flush_subnormals": any(flushes),
        "numeric.rounding": directions.pop() if len(directions) == 1 else "mixed",
        "numeric.threads": torch.get_num_threads(),
    }


def _flushes() -> bool:
    """Whether a subnormal result, or a subnormal operand, becomes zero."""
    small, smallest = torch.full((16,), 1.5e-38), torch.full((16,), 1e-45)
    made, read = small * 0.25, smallest * 2.0**100
    return not bool((made != 0).all() and (read != 0).all())


def _rounding() -> str:
    """The direction in which a sum that lies between two numbers goes."""
    one, part, step = torch.ones(16), torch.full((16,), 2.0**-25), 2.0**-23
    up, down, near = one + part, -one - part, one + (3.0 * part)
    if not bool((up == up[0]).all() and (down == down[0]).all() and (near == near[0]).all()):
        return "mixed"
    found = (up[0].item() - 1.0, down[0].item() + 1.0, near[0].item() - 1.0)
    known = {
        (0.0, 0.0, step): "nearest",
        (step, 0.0, step): "up",
        (0.0, -step, 0.0): "down",
        (0.0, 0.0, 0.0): "zero",
    }
    return known.get(found, "unknown")
