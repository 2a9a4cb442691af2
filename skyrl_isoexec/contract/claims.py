"""The claims: under which conditions a composition keeps its promise, with what proves each."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_isoexec.contract.check import Check
from skyrl_isoexec.contract.values import is_integer, is_text

AXES = ("dp", "tp", "pp", "ep", "sp", "cp")
KINDS = ("invariant", "pinned")
STATES = ("kv_cache", "recurrent_state", "prefix_cache", "derived_weights", "weights")
EVENTS = ("weight_sync", "wake_up", "preemption", "run_start")


@dataclass(frozen=True, kw_only=True)
class TopologyClaim:
    """At which degrees of one parallel axis the composition gives the same bits."""

    axis: str
    """One of `AXES`."""
    kind: str
    """`invariant`: every degree listed gives the bits of every other; `pinned`: the one degree is what there is."""
    degrees: tuple[int, ...]
    """Ascending."""
    proof: tuple[str, ...] = ()
    """Records of gates; none is needed only by `pinned`."""

    def __post_init__(self) -> None:
        check = Check(self)
        check.one_of("axis", AXES)
        check.one_of("kind", KINDS)
        check.items("degrees", lambda v: is_integer(v) and v >= 1, "a positive integer", order=int)
        check.items("proof", is_text, "a gate's record", order=str, empty=True)
        check.done()


@dataclass(frozen=True, kw_only=True)
class StateClaim:
    """What makes a kept state unusable."""

    state: str
    """One of `STATES`."""
    invalidated_by: tuple[str, ...]
    """Of `EVENTS`, in their order."""

    def __post_init__(self) -> None:
        check = Check(self)
        check.one_of("state", STATES)
        check.chosen("invalidated_by", EVENTS, empty=True)
        check.done()


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """A boundary at which bits may differ. With none at all, zero is promised of everything covered."""

    name: str
    boundary: str
    """Between what and what."""
    bound: str
    """How far apart, in words or as a float's bits."""

    def __post_init__(self) -> None:
        check = Check(self)
        check.text("name", "boundary", "bound")
        check.done()


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The conditions under which the composition's promise holds; the runtimes enforce them."""

    topology: tuple[TopologyClaim, ...]
    """In the order of `AXES`."""
    state: tuple[StateClaim, ...]
    """In the order of `STATES`."""
    tolerances: tuple[Tolerance, ...] = ()
    """In the order of their names."""

    def __post_init__(self) -> None:
        check = Check(self)
        for name, kind, order in (
            ("topology", TopologyClaim, lambda c: (AXES.index(c.axis), c.kind, c.degrees, c.proof)),
            ("state", StateClaim, lambda c: (STATES.index(c.state), c.invalidated_by)),
            ("tolerances", Tolerance, lambda t: (t.name, t.boundary, t.bound)),
        ):
            check.items(name, lambda v, k=kind: type(v) is k, f"of class {kind.__name__}", order=order, empty=True)
        check.done()
