"""Names and types of a configuration, read from dataclasses: ours, SkyRL's, and those behind SkyRL's open dicts.

What must stay equal: nothing here constructs a configuration. A wrong name or type is found from the annotations alone,
before anything heavy is imported.
"""

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl_isoexec.launch.hostkeys import host_keys


class ConfigError(ValueError):
    """A configuration that is refused. Its text names the key, what is wrong and what would be right."""

    exit_code = 2


def nearest(name: str, valid: typing.Iterable[str]) -> str | None:
    """The valid name most like `name`, or None if there is none at all."""
    found = difflib.get_close_matches(name, sorted(valid), n=1, cutoff=0.0)
    return found[0] if found else None


def join(prefix: str, name: str) -> str:
    """A dotted key."""
    return f"{prefix}.{name}" if prefix else name


def plain(annotation: Any) -> Any:
    """The annotation without `Annotated` and without `None` among its alternatives."""
    if typing.get_origin(annotation) is typing.Annotated:
        return plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        others = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(others) == 1:
            return plain(others[0])
    return annotation


def hints(cls: type) -> dict[str, Any]:
    """Name and annotation of each field of a dataclass."""
    resolved = typing.get_type_hints(cls, include_extras=True)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls) if field.init}


def leaves(annotation: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key under a dataclass that holds a value rather than more keys."""
    annotation = plain(annotation)
    if not dataclasses.is_dataclass(annotation):
        yield prefix
        return
    for name, inner in hints(annotation).items():
        yield from leaves(inner, join(prefix, name))


def unknown(key: str, name: str, prefix: str, valid: typing.Iterable[str], root: type) -> ConfigError:
    """The refusal of `key`, in which `name` is not among the `valid` names under `prefix`.

    Proposes the nearest name at that level or, where none resembles it, the keys elsewhere that end alike.
    """
    best = nearest(name, valid)
    proposals = [join(prefix, best)] if best is not None else []
    if best is None or difflib.SequenceMatcher(None, name, best).ratio() < 0.6:
        last = key.rsplit(".", 1)[-1]
        alike = difflib.get_close_matches(key, [k for k in leaves(root) if k.endswith(f".{last}")], n=4, cutoff=0.0)
        proposals = alike or proposals
    known = " or ".join(map(repr, proposals))
    return ConfigError(f"{key}: unknown key {join(prefix, name)!r}; did you mean {known}?")


def annotation_of(key: str, root: type) -> Any:
    """The annotation of a dotted key. ConfigError, with the nearest valid name, if there is no such key."""
    current: Any = root
    prefix = ""
    for name in key.split("."):
        inner = plain(current)
        if dataclasses.is_dataclass(inner):
            known = hints(inner)
            if name not in known:
                raise unknown(key, name, prefix, known, root)
            current = known[name]
        elif typing.get_origin(inner) is dict or inner is dict:
            check_host_key(prefix, name)
            current = Any
        elif inner is not Any:
            raise ConfigError(f"{key}: {prefix!r} holds a value and has no key {name!r}; set {prefix}=VALUE")
        prefix = join(prefix, name)
    return current


def check_host_key(prefix: str, name: str) -> None:
    """Refuse a name that an upstream does not accept in one of SkyRL's open dicts."""
    known = host_keys(prefix)
    if known is not None and name not in known:
        raise ConfigError(f"{prefix}.{name}: unknown key; did you mean {join(prefix, nearest(name, known) or '')!r}?")


def describe(annotation: Any) -> str:
    """An annotation in a user's words."""
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in typing.get_args(annotation))
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) in (list, dict):
        name = typing.get_origin(annotation).__name__
        inner = ", ".join(describe(a) for a in typing.get_args(annotation))
        return f"{name} of {inner}" if inner else name
    return getattr(annotation, "__name__", str(annotation))


def fits(annotation: Any, value: Any) -> bool:
    """Whether a plain value (from YAML or the command line) is of the annotated type. Dataclasses take a dict."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin is typing.Annotated:
        return fits(arguments[0], value)
    if origin in (typing.Union, types.UnionType):
        return any(fits(choice, value) for choice in arguments)
    if origin is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is list or annotation is list:
        return isinstance(value, list) and all(fits(arguments[0], item) for item in value if arguments)
    if origin is dict or annotation is dict or dataclasses.is_dataclass(annotation):
        return isinstance(value, dict)
    if annotation is type(None):
        return value is None
    if annotation is float:
        return type(value) in (int, float)
    if annotation is Path:
        return isinstance(value, str)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return value in [member.value for member in annotation]
    return type(value) is annotation


def check(annotation: Any, value: Any, key: str, root: type) -> None:
    """Refuse, at any depth under `key`, an unknown name or a value of a wrong type."""
    if not fits(annotation, value):
        message = f"{key}={value!r}: expected {describe(annotation)}"
        if typing.get_origin(plain(annotation)) is typing.Literal:
            message += f"; did you mean {nearest(str(value), map(str, typing.get_args(plain(annotation))))!r}?"
        raise ConfigError(message)
    inner = plain(annotation)
    if not isinstance(value, dict):
        return
    if dataclasses.is_dataclass(inner):
        known = hints(inner)
        for name, item in value.items():
            if name not in known:
                raise unknown(join(key, str(name)), str(name), key, known, root)
            check(known[name], item, join(key, name), root)
    elif inner is dict or typing.get_origin(inner) is dict:
        for name in value:
            check_host_key(key, str(name))


def build(cls: type, tree: dict[str, Any], key: str = "") -> Any:
    """A frozen dataclass of ours from a checked tree. ConfigError for a missing field or a refused value."""
    known = hints(cls)
    missing = known.keys() - tree.keys()
    if missing:
        raise ConfigError(f"{', '.join(sorted(join(key, name) for name in missing))}: not set by any file of configs/")
    values = {}
    for name, annotation in known.items():
        inner, value = plain(annotation), tree[name]
        is_nested = dataclasses.is_dataclass(inner) and isinstance(value, dict)
        values[name] = build(inner, value, join(key, name)) if is_nested else value
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
