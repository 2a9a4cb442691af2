"""The command line, read with Hydra's own grammar: which files of configs/ are chosen and which values are set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from skyrl_isoexec.launch.schema import ConfigError, join, nearest


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What a command line asks for."""

    groups: dict[str, str] = field(default_factory=dict)
    """{group: name of its file}."""
    values: dict[str, Any] = field(default_factory=dict)
    """{dotted key: value}, with mappings taken apart into the keys inside."""
    assignments: tuple[str, ...] = ()
    """The values once more, as Hydra's own assignments."""


def groups_of(folder: Path) -> dict[str, list[str]]:
    """{group: its options}, from the files under the configuration folder."""
    found = {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in folder.iterdir() if path.is_dir()}
    return dict(sorted(found.items()))


def parse(arguments: Sequence[str], groups: dict[str, list[str]]) -> Overrides:
    """Read arguments such as `+exec=isoexec`, `topology=trainer_tp2` or `trainer.seed=3`. ConfigError for others.

    A leading `+` or `++` is allowed and means nothing: there is no key to be added that the schema does not have. As in
    Hydra, the last of several assignments to one key or group holds, so that a script can end in the user's arguments.
    """
    chosen: dict[str, str] = {}
    values: dict[str, Any] = {}
    assignments: list[str] = []
    for argument in arguments:
        override = read(argument)
        key, value = override.key_or_group, override.value()
        if key in groups and not isinstance(value, dict):
            chosen[key] = _option(key, value, groups[key])
            continue
        given = flatten(key, value)
        for name, inner in given.items():
            sound(name, inner)
        values |= given
        assignments.append(f"++{argument.lstrip('+')}")
    return Overrides(groups=chosen, values=values, assignments=tuple(assignments))


def read(argument: str) -> Override:
    """One argument, parsed. ConfigError for flags, deletions, sweeps and bad syntax."""
    if argument.startswith("-"):
        raise ConfigError(f"{argument}: not KEY=VALUE; there are no flags here")
    if argument.lstrip("+").startswith("="):
        raise ConfigError(f"{argument}: no key before '='; give KEY=VALUE")
    if argument.startswith("~"):
        raise ConfigError(f"{argument}: keys cannot be deleted; set {argument[1:].split('=')[0]}=VALUE")
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{argument}: not KEY=VALUE in Hydra's grammar ({reason}); quote unusual text") from error
    if override.is_sweep_override():
        raise ConfigError(f"{argument}: a sweep; give one value, and quote it if it contains a comma")
    if override.package is not None:
        raise ConfigError(f"{argument}: packages (@) cannot be chosen; give GROUP=OPTION or KEY=VALUE")
    return override


def sound(key: str, value: Any) -> None:
    """Refuse values of the right type that no setting has: empty text, infinity and what is not a number."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and not item.strip():
            raise ConfigError(f"{key} is given an empty text; give a value, or leave {key} out")
        if isinstance(item, float) and not math.isfinite(item):
            raise ConfigError(f"{key}={item} is not a finite number; give one, or leave {key} out")


def flatten(key: str, value: Any) -> dict[str, Any]:
    """{dotted key: value} with the mappings inside `value` taken apart; an empty mapping stays a value."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {k: v for name, inner in value.items() for k, v in flatten(join(key, str(name)), inner).items()}


def _option(group: str, value: Any, options: list[str]) -> str:
    if value not in options:
        raise ConfigError(
            f"{group}={value}: {group} has no option {value!r}; did you mean {nearest(str(value), options)!r}? "
            f"(there are {', '.join(options)})"
        )
    return value
