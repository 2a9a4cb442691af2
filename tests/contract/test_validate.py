"""A contract that does not keep together is refused, with a line for everything that is wrong."""

import dataclasses
from dataclasses import replace

import pytest

from skyrl_isoexec.contract import (
    CASES,
    Claims,
    Contract,
    ContractError,
    Discharge,
    StateClaim,
    Tolerance,
    TopologyClaim,
    plain,
    seal,
    validate,
)
from skyrl_isoexec.contract.errors import SEAL


def violations(contract: Contract) -> list[str]:
    with pytest.raises(ContractError) as refused:
        validate(contract)
    return str(refused.value).splitlines()


def with_entry(contract: Contract, op: str, **fields) -> Contract:
    """The contract with the first entry that owns `op` changed."""
    i = next(i for i, entry in enumerate(contract.composition) if op in entry.region)
    changed = [replace(entry, **fields) if j == i else entry for j, entry in enumerate(contract.composition)]
    return seal(replace(contract, composition=tuple(changed)))


def with_claims(contract: Contract, **fields) -> Contract:
    return seal(replace(contract, claims=replace(contract.claims, **fields)))


def with_axis(contract: Contract, claim: TopologyClaim) -> Contract:
    rest = tuple(c for c in contract.claims.topology if c.axis != claim.axis)
    return with_claims(contract, topology=(*rest, claim))


def with_degrees(contract: Contract, side: str, **degrees) -> Contract:
    """`...` takes a degree out."""
    given = {k: v for k, v in {**contract.deployment[side], **degrees}.items() if v is not ...}
    return seal(replace(contract, deployment={**contract.deployment, side: given}))


def test_valid(contract):
    assert validate(contract) is None
    assert validate(with_degrees(contract, "trainer", tp=4, ep=1, cp=1)) is None
    assert validate(with_claims(contract, tolerances=())) is None


def test_an_operator_without_an_owner(contract):
    (line,) = violations(with_entry(contract, "mlp.act", cases=tuple(c.name for c in CASES[:3])))
    assert line.startswith(
        "composition is without an owner of mlp.act in engine_decode; it must be one entry that owns"
    )


def test_an_operator_with_two(contract):
    lines = violations(with_entry(contract, "embed", region=("embed", "mlp.act")))
    owned = [line for line in lines if "a second owner of mlp.act in" in line]
    assert len(owned) == 4 and all("swiglu.cpu" in line or "embedding.cpu" in line for line in owned)
    assert sum(".discharge is None" in line for line in lines) == 2


def test_an_operator_that_is_not_the_models(contract):
    (line,) = violations(with_entry(contract, "mlp.act", region=("mlp.act", "moe.route")))
    assert "region[1] is 'moe.route'; it must be an operator of model.ops" in line


def test_a_case_that_is_missing_or_changed(contract):
    lines = violations(seal(replace(contract, cases=CASES[:3])))
    assert lines == ["cases is without engine_decode; it must be every case of this release; use contract.CASES"]
    changed = (*CASES[:3], replace(CASES[3], rows="chunk"))
    assert violations(seal(replace(contract, cases=changed))) == [
        "cases[3].rows is 'chunk'; it must be 'single' for engine_decode"
    ]
    twice = (*CASES, replace(CASES[0], grad=False))
    lines = violations(seal(replace(contract, cases=twice)))
    assert [line.split(" is ")[0] for line in lines] == ["cases[1].name", "cases[1].grad"]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_ways_that_differ_are_discharged_on_each_entry(contract, left):
    """The two implementations of `logprob` are proven equal on both entries; either or both left out is refused."""
    changed = tuple(
        replace(entry, discharge=None)
        if entry.region == ("logprob",) and (left == 2 or entry.impl.id == ("logprob.cpu", "logprob.rows")[left])
        else entry
        for entry in contract.composition
    )
    lines = violations(seal(replace(contract, composition=changed)))
    assert len(lines) == (2 if left == 2 else 1)
    assert all(".discharge is None; it must be a gate's record: other cases compute logprob" in line for line in lines)


def test_other_constants_are_another_way_and_other_entries_are_not(contract):
    act = next(entry for entry in contract.composition if entry.region == ("mlp.act",))
    rest = tuple(entry for entry in contract.composition if entry is not act)
    halves = (replace(act, cases=act.cases[:2]), replace(act, cases=act.cases[2:]))
    validate(seal(replace(contract, composition=(*rest, *halves))))
    halves = (halves[0], replace(halves[1], constants={"block": True}))
    assert len(violations(seal(replace(contract, composition=(*rest, *halves))))) == 2
    halves = (replace(halves[0], constants={"block": 1}), halves[1])
    assert len(violations(seal(replace(contract, composition=(*rest, *halves))))) == 2


@pytest.mark.parametrize(
    ("ref", "needed"),
    [
        ("gates/cpu/swiglu", "a gate's record: gates/<arch>/<region>@<16 hex digits>"),
        ("gates/tpu/swiglu@0123456789abcdef", "a gate's record"),
        ("gates/cpu/swiglu@0123456789ABCDEF", "a gate's record"),
        ("gates/cpu/swiglu@0123456789abcdef\n", "a gate's record"),
        ("gates/sm90/swiglu@0123456789abcdef", "a record of arch cpu"),
        ("gates/cpu/rope@0123456789abcdef", "a record of region decoder or swiglu"),
        ("gates/cpu/decoders@0123456789abcdef", "a record of region decoder or swiglu"),
    ],
)
def test_gates(contract, ref, needed):
    (line,) = violations(with_entry(contract, "mlp.act", gate=ref))
    assert ".gate is " in line and f"it must be {needed}" in line
    lines = violations(with_entry(contract, "logprob", discharge=Discharge(kind="gate", ref="gates/sm90/x@0")))
    assert len(lines) == 1 and ".discharge.ref is " in lines[0]


def test_topology_claims(contract):
    pinned = TopologyClaim(axis="ep", kind="pinned", degrees=(1, 2))
    assert "].degrees is [1, 2]; it must be one degree: ep is pinned" in violations(with_axis(contract, pinned))[0]
    unproven = TopologyClaim(axis="ep", kind="invariant", degrees=(1, 2))
    (line,) = violations(with_axis(contract, unproven))
    assert "].proof is empty; it must be records of gates that ran ep at 1 or 2; run the gate, or pin the axis" in line
    other = TopologyClaim(axis="ep", kind="invariant", degrees=(1,), proof=("gates/sm90/moe@0123456789abcdef", "x"))
    assert [
        "].proof[0] is" in violations(with_axis(contract, other))[0],
        len(violations(with_axis(contract, other))),
    ] == [
        True,
        2,
    ]
    lines = violations(with_claims(contract, topology=contract.claims.topology[1:]))
    assert lines[0].startswith(
        "claims.topology is with 0 claims of dp; it must be one claim of each axis; an axis that"
    )
    twice = (*contract.claims.topology, TopologyClaim(axis="tp", kind="pinned", degrees=(2,)))
    lines = violations(with_claims(contract, topology=twice))
    assert [line.partition(";")[0] for line in lines] == [
        "claims.topology is with 2 claims of tp",
        "deployment.engine.tp is 1",
    ]


@pytest.mark.parametrize(
    ("side", "degrees", "line"),
    [
        ("trainer", {"tp": 8}, "deployment.trainer.tp is 8; it must be 1 or 2 or 4, as claims.topology has it of tp"),
        ("trainer", {"dp": 3}, "deployment.trainer.dp is 3; it must be 1 or 2,"),
        ("trainer", {"pp": 4}, "deployment.trainer.pp is 4"),
        ("trainer", {"pp": ...}, "deployment.trainer.pp is missing"),
        ("trainer", {"cp": 2}, "deployment.trainer.cp is 2; it must be 1,"),
        ("trainer", {"tp": True}, "deployment.trainer.tp is True; it must be a positive integer"),
        ("trainer", {"tp": 0}, "deployment.trainer.tp is 0"),
        ("engine", {"tp": "1"}, "deployment.engine.tp is '1'"),
        ("engine", {"tp": {"a": 1}}, "deployment.engine.tp is {'a': 1}"),
        ("engine", {"tp": ...}, "deployment.engine.tp is missing"),
        ("engine", {"num": 3}, "deployment.engine.num is 3; it must be 1 or 2, as claims.topology has it of dp"),
        ("engine", {"num": None}, "deployment.engine.num is None"),
        ("engine", {"pp": 3}, "deployment.engine.pp is 3"),
        ("engine", {"dp": 3}, "deployment.engine.dp is 3"),
        ("engine", {"ep": 2}, "deployment.engine.ep is 2"),
    ],
)
def test_degrees(contract, side, degrees, line):
    (found,) = violations(with_degrees(contract, side, **degrees))
    assert found.startswith(line)


def test_an_axis_that_is_pinned_above_1_is_not_absent(contract):
    claim = TopologyClaim(axis="cp", kind="pinned", degrees=(2,))
    assert [line.partition(";")[0] for line in violations(with_axis(contract, claim))] == [
        "deployment.trainer.cp is 1",
        "deployment.engine.cp is 1",
    ]


def test_sides_are_there(contract):
    lines = violations(seal(replace(contract, deployment={"trainer": 1})))
    assert lines == [
        "deployment.trainer is 1; it must be a mapping with tp, pp, dp, ep",
        "deployment.engine is missing; it must be a mapping with tp, num",
    ]


def test_state_claims(contract):
    twice = (*contract.claims.state[1:], StateClaim(state="weights", invalidated_by=()))
    assert violations(with_claims(contract, state=twice)) == [
        "claims.state is with 0 claims of kv_cache; it must be one claim of each state",
        "claims.state is with 2 claims of weights; it must be one claim of each state",
    ]
    for state in ("kv_cache", "prefix_cache", "derived_weights"):
        changed = tuple(
            StateClaim(state=c.state, invalidated_by=("wake_up",)) if c.state == state else c
            for c in contract.claims.state
        )
        (line,) = violations(with_claims(contract, state=changed))
        assert f"it must be with weight_sync: {state} follows weights" in line


def test_tolerances_have_names_of_their_own(contract):
    twice = tuple(Tolerance(name="a", boundary=boundary, bound="0") for boundary in "xy")
    assert violations(with_claims(contract, tolerances=twice)) == [
        "claims.tolerances[1].name is 'a'; it must be a name that no other tolerance has"
    ]


def test_what_the_model_says_twice(contract):
    fields = {**contract.model.fields, "dtype": "bfloat16"}
    (line,) = violations(seal(replace(contract, model=replace(contract.model, fields=fields))))
    assert line == "model.fields.dtype is 'bfloat16'; it must be model.dtype, 'float32'"


def test_identities_are_recomputed(contract):
    stale = replace(contract, deployment={**contract.deployment, "more": 1})
    (line,) = violations(stale)
    old, new = contract.identities.deployment, seal(stale).identities.deployment
    assert line == f"identities.deployment is {old}; it must be {new}, the digest of the fields; {SEAL}"
    assert violations(replace(contract, identities=None))[0].startswith("identities is None")


def test_everything_at_once(contract):
    """Nothing hides behind the first violation, and every line names its field."""
    wrong = replace(
        with_entry(contract, "mlp.act", region=("moe.x",), gate="?"),
        cases=CASES[1:],
        claims=Claims(topology=(), state=()),
        deployment={},
    )
    lines = violations(wrong)
    for field in ("cases", "composition", "claims.topology", "claims.state", "deployment.trainer", "deployment.engine"):
        assert any(line.startswith(f"{field} is ") for line in lines), field
    for name in ("semantic", "numerical_policy", "deployment"):
        assert any(line.startswith(f"identities.{name} is ") for line in lines)
    assert sum("without an owner of mlp.act" in line for line in lines) == 4
    assert any(".gate is '?'" in line for line in lines) and len(lines) == len(set(lines)) > 20


def test_what_is_no_contract(contract):
    for wrong in (None, plain(contract), contract.model, dataclasses.asdict(contract.claims)):
        with pytest.raises(ContractError, match="it must be a Contract"):
            validate(wrong)
