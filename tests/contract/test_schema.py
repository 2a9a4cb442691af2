"""A part of a contract is checked when it is made, and cannot be changed afterwards."""

import copy
import dataclasses
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_isoexec.contract import (
    CASES,
    Case,
    ContractError,
    Discharge,
    Entry,
    Identities,
    Impl,
    Model,
    StateClaim,
    TopologyClaim,
    float_bits,
    from_bits,
    seal,
)

SHA = "0" * 64
IMPL = Impl(id="rope.cpu", version=1, arch="cpu", source=SHA)
ENTRY = {"region": ("attn.rope",), "cases": ("engine_decode",), "impl": IMPL, "constants": {}, "gate": "g"}


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        (Impl, {"id": "rope"}, "Impl.id is 'rope'"),
        (Impl, {"version": True}, "Impl.version is True"),
        (Impl, {"version": 0}, "Impl.version is 0"),
        (Impl, {"version": 1.0}, "Impl.version is 1.0"),
        (Impl, {"version": 2**63}, "Impl.version is 9223372036854775808"),
        (Impl, {"arch": "cuda"}, "Impl.arch is 'cuda'; it must be one of cpu, sm90"),
        (Impl, {"source": "A" * 64}, "Impl.source is"),
        (Case, {"name": "engine_beam"}, "Case.name is 'engine_beam'; it must be one of trainer_fwd"),
        (Case, {"grad": 0}, "Case.grad is 0; it must be true or false"),
        (Case, {"rows": "all"}, "Case.rows is 'all'"),
        (Case, {"constraints": ("fast",)}, r"Case.constraints\[0\] is 'fast'"),
        (Entry, {"region": ["attn.rope"]}, r"Entry.region is \['attn.rope'\]; it must be a tuple"),
        (Entry, {"region": ()}, r"Entry.region is \(\); it must be at least one"),
        (Entry, {"region": ("b", "a", "b")}, r"Entry.region\[2\] is 'b'; it must be given once"),
        (Entry, {"region": ("Attn",)}, r"Entry.region\[0\] is 'Attn'"),
        (Entry, {"cases": ("decode",)}, r"Entry.cases\[0\] is 'decode'"),
        (Entry, {"impl": {"id": "rope.cpu"}}, "Entry.impl is .* it must be of class Impl"),
        (Entry, {"constants": {"eps": 1e-6}}, "Entry.constants.eps is 1e-06"),
        (Entry, {"constants": {"eps": None}}, "Entry.constants.eps is None"),
        (Entry, {"constants": {"eps": "f64:1"}}, "Entry.constants.eps is 'f64:1'"),
        (Entry, {"constants": {"eps": {"x": 1}}}, "Entry.constants.eps is"),
        (Entry, {"constants": {1: 1}}, "Entry.constants is .*its key 1"),
        (Entry, {"constants": {"x": "\ud800"}}, "Entry.constants.x is"),
        (Entry, {"constants": None}, "Entry.constants is None; it must be a mapping"),
        (Entry, {"discharge": "gate"}, "Entry.discharge is 'gate'"),
        (Entry, {"gate": ""}, "Entry.gate is ''"),
        (TopologyClaim, {"degrees": (0,)}, r"TopologyClaim.degrees\[0\] is 0"),
        (TopologyClaim, {"degrees": ()}, "TopologyClaim.degrees"),
        (TopologyClaim, {"axis": "xp"}, "TopologyClaim.axis is 'xp'"),
        (StateClaim, {"invalidated_by": ("reboot",)}, r"StateClaim.invalidated_by\[0\]"),
        (Discharge, {"kind": "belief"}, "Discharge.kind is 'belief'; it must be gate"),
        (Model, {"ops": ("a", "a")}, r"Model.ops\[1\]"),
        (Model, {"fields": {"x": [1]}}, r"Model.fields.x is \[1\]"),
        (Identities, {"semantic": "x"}, "Identities.semantic is 'x'"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(kind, fields, field):
    good = {
        Impl: dict(id="rope.cpu", version=1, arch="cpu", source=SHA),
        Case: {f.name: getattr(CASES[0], f.name) for f in dataclasses.fields(Case)},
        Entry: ENTRY,
        TopologyClaim: dict(axis="tp", kind="pinned", degrees=(1,)),
        StateClaim: dict(state="weights", invalidated_by=()),
        Discharge: dict(kind="gate", ref="r"),
        Model: dict(family="f", dtype="d", ops=("a",), fields={}),
        Identities: dict(semantic=SHA, numerical_policy=SHA, deployment=SHA),
    }[kind]
    kind(**good)
    with pytest.raises(ContractError, match=f"^{field}"):
        kind(**{**good, **fields})


def test_all_wrong_fields_at_once():
    with pytest.raises(ContractError) as refused:
        Impl(id="", version=-1, arch="", source="")
    assert [v.field for v in refused.value.violations] == ["id", "version", "arch", "source"]
    assert len(str(refused.value).splitlines()) == 4
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_contract_itself_is_checked(contract):
    for field, value in (("schema_version", 2), ("schema_version", True), ("cases", ()), ("composition", None)):
        with pytest.raises(ContractError, match=f"Contract.{field}"):
            dataclasses.replace(contract, **{field: value})
    for field, value in (("versions", {"torch": 2}), ("sources", {"model": "x"}), ("deployment", {"a": {"b": 0.5}})):
        with pytest.raises(ContractError, match=f"Contract.{field}[.]"):
            dataclasses.replace(contract, **{field: value})
    deep: dict = {}
    deep["again"] = deep
    with pytest.raises(ContractError, match="Contract.deployment.again.again"):
        dataclasses.replace(contract, deployment=deep)


def test_nothing_can_be_changed(contract):
    given_constants = {"eps": 1}
    entry = Entry(**{**ENTRY, "constants": given_constants})
    given_constants["eps"] = 2
    assert entry.constants == {"eps": 1}
    for change in (
        lambda: setattr(contract, "schema_version", 2),
        lambda: setattr(entry.constants, "_items", {}),
        lambda: delattr(entry.constants, "_items"),
        lambda: contract.deployment["trainer"].__setitem__("tp", 4),
        lambda: contract.versions.update(torch="1"),
        lambda: contract.versions._items.__setitem__("torch", "1"),
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()


def test_equality_is_of_types_too_and_hashable(contract):
    one, yes = ({**ENTRY, "constants": {"a": value}} for value in (1, True))
    assert Entry(**one) != Entry(**yes) and Entry(**one) == Entry(**one)
    for copied in (pickle.loads(pickle.dumps(contract)), copy.deepcopy(contract), seal(contract)):
        assert copied == contract and hash(copied) == hash(contract)
    assert contract.versions == {"numba": "0.65.0", "torch": "2.11.0"} != contract.sources
    assert contract.versions != 1 and dict(contract.versions) == contract.versions


def test_a_set_has_one_order(contract):
    turned = dataclasses.replace(
        contract,
        cases=contract.cases[::-1],
        composition=tuple(
            dataclasses.replace(e, region=e.region[::-1], cases=e.cases[::-1]) for e in contract.composition[::-1]
        ),
        versions=dict(reversed(list(contract.versions.items()))),
        claims=dataclasses.replace(
            contract.claims,
            topology=tuple(
                dataclasses.replace(c, degrees=c.degrees[::-1], proof=c.proof[::-1]) for c in contract.claims.topology
            )[::-1],
            state=contract.claims.state[::-1],
        ),
    )
    assert turned == contract


@settings(deadline=None, derandomize=True)
@given(st.floats(allow_nan=False))
def test_bits_of_a_float_are_exact(x):
    again = from_bits(float_bits(x))
    assert struct.pack("<d", again) == struct.pack("<d", x)


def test_bits_tell_what_equality_does_not():
    assert float_bits(1e-6) == "f64:3eb0c6f7a0b5ed8d" and float_bits(0.0) != float_bits(-0.0)
    for wrong in (float("nan"), 1, True, "1.0", None):
        with pytest.raises(ContractError, match="a float that is a number"):
            float_bits(wrong)
    for wrong in ("f64:7ff8000000000000", "f64:3EB0C6F7A0B5ED8D", "f64:", "1.0", 1, None, "f32:00000000"):
        with pytest.raises(ContractError, match="16 hex digits"):
            from_bits(wrong)
