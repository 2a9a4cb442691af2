"""What an execution contract is: every choice that can change a bit of a log-probability, as frozen plain data.

Each class checks the types and forms of its own fields and refuses to be made otherwise, with a ContractError that
names them all. What only the whole can tell (is every operator owned, is every degree proven) is in `validate.py`. A
tuple that is a set is put in its one order, a mapping is copied and frozen: equal meaning is equal data and bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_isoexec.contract.cases import CASE_NAMES, CASES, Case
from skyrl_isoexec.contract.check import Check
from skyrl_isoexec.contract.claims import Claims
from skyrl_isoexec.contract.values import Scalar, is_scalar, is_scalar_or_none, is_sha256, is_text

SCHEMA_VERSION = 1
ARCHES = ("cpu", "sm90")

_NAME = r"[a-z][a-z0-9_]*"
OP = re.compile(rf"{_NAME}(\.{_NAME})*")
IMPL = rf"{_NAME}\.{_NAME}"
GATE = re.compile(rf"gates/(?P<arch>{'|'.join(ARCHES)})/(?P<region>{_NAME})@[0-9a-f]{{16}}")
GATE_FORM = "a gate's record: gates/<arch>/<region>@<16 hex digits>"


def _is_op(value: object) -> bool:
    return is_text(value) and OP.fullmatch(value) is not None


@dataclass(frozen=True, kw_only=True)
class Impl:
    """One implementation of one operator."""

    id: str
    """`op.file`, as in `attention.cpu`."""
    version: int
    """At least 1."""
    arch: str
    """One of `ARCHES`."""
    source: str
    """SHA-256 of the source that decides its bits."""

    def __post_init__(self) -> None:
        check = Check(self)
        check.match("id", IMPL, "op.file, as in attention.cpu")
        check.positive("version")
        check.one_of("arch", ARCHES)
        check.sha256("source")
        check.done()

    @property
    def op(self) -> str:
        """The operator's folder."""
        return self.id.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Discharge:
    """Why an implementation that other cases do not share gives the same bits as theirs."""

    kind: str
    """`gate`: a record of a run that compared them."""
    ref: str
    """The gate's record."""

    def __post_init__(self) -> None:
        check = Check(self)
        check.one_of("kind", ("gate",))
        check.text("ref")
        check.done()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What computes one span of the model in some of the cases."""

    region: tuple[str, ...]
    """The logical operators of the span, sorted."""
    cases: tuple[str, ...]
    """Names of cases, in the order of `CASES`."""
    impl: Impl
    constants: Mapping[str, Scalar]
    """Every number of the implementation that can change a bit."""
    gate: str
    """The gate's record that admitted the implementation."""
    discharge: Discharge | None = None
    """Needed where another case computes the region otherwise."""

    def __post_init__(self) -> None:
        check = Check(self)
        check.items("region", _is_op, "the name of a logical operator", order=str)
        check.chosen("cases", CASE_NAMES)
        check.instance("impl", Impl)
        check.mapping("constants", is_scalar, "text, an integer, true, false or a float's bits")
        check.text("gate")
        check.instance("discharge", Discharge, optional=True)
        check.done()


@dataclass(frozen=True, kw_only=True)
class Model:
    """The function that is computed, whatever computes it."""

    family: str
    dtype: str
    """Type of weights and residual stream."""
    ops: tuple[str, ...]
    """All logical operators, each once, in the order of the forward."""
    fields: Mapping[str, Scalar | None]
    """The decoder's configuration, flattened with dots, floats as bits."""

    def __post_init__(self) -> None:
        check = Check(self)
        check.text("family", "dtype")
        check.items("ops", _is_op, "the name of a logical operator")
        check.mapping("fields", is_scalar_or_none, "text, an integer, true, false, null or a float's bits")
        check.done()


@dataclass(frozen=True, kw_only=True)
class Identities:
    """Digests of three parts of the contract. The first two must match between processes."""

    semantic: str
    """Of the model and the cases: is it the same function?"""
    numerical_policy: str
    """Of everything that can change a bit."""
    deployment: str
    """Of what is proven not to change one."""

    def __post_init__(self) -> None:
        check = Check(self)
        check.sha256("semantic", "numerical_policy", "deployment")
        check.done()


@dataclass(frozen=True, kw_only=True)
class Contract:
    """An execution contract. `identity.seal` fills in `identities`; without them it has no bytes and is not valid."""

    schema_version: int = SCHEMA_VERSION
    model: Model
    cases: tuple[Case, ...] = CASES
    """In the order of `CASES`."""
    composition: tuple[Entry, ...]
    """What computes what, in order of region and cases."""
    versions: Mapping[str, str]
    """Name of a distribution that computes -> its version."""
    sources: Mapping[str, str]
    """Name of a part of our own source -> its SHA-256."""
    claims: Claims
    deployment: Mapping[str, object]
    """Scalars, None and mappings of them: degrees of both sides, sizes, environment; proven not to change a bit."""
    identities: Identities | None = None

    def __post_init__(self) -> None:
        check = Check(self)
        check.that(
            "schema_version",
            lambda v: type(v) is int and v == SCHEMA_VERSION,
            str(SCHEMA_VERSION),
            "use the release that made the contract",
        )
        check.instance("model", Model)
        check.items("cases", lambda v: type(v) is Case, "of class Case", order=lambda c: CASE_NAMES.index(c.name))
        check.items("composition", lambda v: type(v) is Entry, "of class Entry", order=_place)
        check.mapping("versions", is_text, "text that is not empty")
        check.mapping("sources", is_sha256, "a SHA-256 in 64 lowercase hex digits")
        check.instance("claims", Claims)
        check.mapping("deployment", is_scalar_or_none, "text, an integer, true, false, null or a mapping", nested=True)
        check.instance("identities", Identities, optional=True)
        check.done()


def _place(entry: Entry) -> tuple[object, ...]:
    return entry.region, tuple(CASE_NAMES.index(name) for name in entry.cases), entry.impl.id, entry.gate
