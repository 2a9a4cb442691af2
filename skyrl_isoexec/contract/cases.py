"""The cases: the closed list of ways in which a log-probability is computed. Any other way is refused."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_isoexec.contract.check import Check

CASE_NAMES = ("trainer_fwd", "trainer_fwd_no_autograd", "engine_prefill", "engine_decode")
"""The closed list of ways in which a log-probability is computed."""
ROLES = ("trainer", "engine")
STATE_MODES = ("fresh", "resumable", "continued")
ROWS = ("packed", "chunk", "single")
CONSTRAINTS = ("graph_capturable", "host_free", "address_stable")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way in which a log-probability is computed."""

    name: str
    """One of `CASE_NAMES`."""
    role: str
    """The side that runs it, one of `ROLES`."""
    grad: bool
    """Whether a graph for the backward is recorded."""
    state: str
    """`fresh`: no state before it; `resumable`: may start from cached state; `continued`: always does."""
    rows: str
    """Rows of a sequence in one call: `packed` is all of them, `chunk` any number after the cached, `single` is one."""
    constraints: tuple[str, ...] = ()
    """What an implementation must bear, of `CONSTRAINTS`: a captured graph, no host work, buffers that never move."""

    def __post_init__(self) -> None:
        check = Check(self)
        check.one_of("name", CASE_NAMES)
        check.one_of("role", ROLES)
        check.flag("grad")
        check.one_of("state", STATE_MODES)
        check.one_of("rows", ROWS)
        check.chosen("constraints", CONSTRAINTS, empty=True)
        check.done()


CASES: tuple[Case, ...] = (
    Case(name="trainer_fwd", role="trainer", grad=True, state="fresh", rows="packed"),
    Case(name="trainer_fwd_no_autograd", role="trainer", grad=False, state="fresh", rows="packed"),
    Case(
        name="engine_prefill",
        role="engine",
        grad=False,
        state="resumable",
        rows="chunk",
        constraints=("address_stable",),
    ),
    Case(name="engine_decode", role="engine", grad=False, state="continued", rows="single", constraints=CONSTRAINTS),
)
"""The cases that this release knows. The forward that recomputation repeats in the backward is a `trainer_fwd`."""
