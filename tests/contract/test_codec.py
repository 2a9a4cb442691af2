"""A contract has one spelling, which is read back whole; any other bytes are refused by the field."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_isoexec.contract import (
    Contract,
    ContractError,
    Entry,
    Impl,
    canonical,
    decode,
    digest,
    encode,
    parse,
    plain,
    seal,
    validate,
)

quick = settings(deadline=None, derandomize=True, max_examples=60)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda s: not s.startswith("f64:"))
names = words.filter(bool)
scalars = st.one_of(words, st.booleans(), st.integers(-(2**63), 2**63 - 1))
ops = st.from_regex(r"[a-z][a-z0-9_]{0,3}(\.[a-z]{1,3})?", fullmatch=True)
cases = st.lists(
    st.sampled_from(["trainer_fwd", "engine_prefill", "engine_decode"]), min_size=1, max_size=3, unique=True
)
entries = st.builds(
    Entry,
    region=st.lists(ops, min_size=1, max_size=3, unique=True).map(tuple),
    cases=cases.map(tuple),
    impl=st.builds(
        Impl,
        id=st.just("op.cpu"),
        version=st.integers(1, 9),
        arch=st.sampled_from(["cpu", "sm90"]),
        source=st.just("0" * 64),
    ),
    constants=st.dictionaries(names, scalars, max_size=3),
    gate=names,
)
deployments = st.dictionaries(
    names, st.none() | scalars | st.dictionaries(names, st.none() | scalars, max_size=2), max_size=3
)


def test_example_is_valid_and_read_back(contract):
    validate(contract)
    raw = encode(contract)
    assert decode(raw) == contract == decode(raw.decode())
    assert digest(decode(raw)) == digest(contract) and len(digest(contract)) == 64
    assert raw == json.dumps(plain(contract), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@quick
@given(st.lists(entries, min_size=1, max_size=4, unique=True), deployments, st.dictionaries(names, names, max_size=2))
def test_round_trip(contract, composition, deployment, versions):
    made = seal(dataclasses.replace(contract, composition=tuple(composition), deployment=deployment, versions=versions))
    raw = encode(made)
    read = decode(raw)
    assert read == made and hash(read) == hash(made) and encode(read) == raw


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.data())
def test_a_changed_byte_is_never_taken(contract, data):
    """Whichever byte is lost, added or changed, the contract is refused by one of the two."""
    raw = encode(contract)
    at, new = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.binary(max_size=1))
    changed = raw[:at] + new + raw[at + data.draw(st.integers(0, 1)) :]
    if changed == raw:
        return
    with pytest.raises(ContractError):
        validate(decode(changed))


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("composition", 3, "impl", "arch"), "cuda", "composition[3].impl.arch is 'cuda'; it must be one of cpu"),
        (("composition", 3, "impl", "arch"), ..., "composition[3].impl.arch is missing"),
        (("composition", 3, "impl", "color"), "red", "composition[3].impl.color is an unknown key"),
        (("composition", 3, "impl", "version"), True, "composition[3].impl.version is True"),
        (("composition", 3, "impl"), None, "composition[3].impl is None; it must be an object"),
        (("composition", 3, "cases"), "engine_decode", "composition[3].cases is 'engine_decode'; it must be an array"),
        (("composition", 3, "cases"), ["engine_decode", "trainer_fwd"], "composition[3].cases is in another order"),
        (("cases", 0, "grad"), 1, "cases[0].grad is 1"),
        (("claims", "topology", 1, "degrees"), [4, 2, 1], "claims.topology[1].degrees is in another order"),
        (("model", "fields", "x y"), [], "model.fields['x y'] is []"),
        (("model", "ops", 2), 3, "model.ops[2] is 3"),
        (("deployment", "engine", "tp"), [1], "deployment.engine.tp is [1]"),
        (("schema_version",), 2, "schema_version is 2; it must be 1"),
        (("schema_version",), ..., "schema_version is missing"),
        (("extra",), 1, "extra is an unknown key"),
        (("identities",), None, "identities is None"),
        (("identities", "semantic"), "0", "identities.semantic is '0'"),
        (("versions", "torch"), "\ud800", "versions.torch is '\\ud800'"),
        (("versions", "torch"), "", "versions.torch is ''"),
        (("deployment", "threads"), 2**63, "deployment.threads is 9223372036854775808"),
    ],
)
def test_refused_by_the_field(edited, path, value, line):
    raw = json.dumps(edited(*path, to=value), sort_keys=True, separators=(",", ":"))
    with pytest.raises(ContractError) as refused:
        decode(raw)
    assert str(refused.value).startswith(line) and len(refused.value.violations) == 1


def test_several_at_once(edited):
    data = edited("composition", 3, "impl", "arch", to="cuda")
    del data["model"]["family"]
    data["cases"][0]["grad"] = None
    with pytest.raises(ContractError) as refused:
        decode(canonical(data))
    fields = [v.field for v in refused.value.violations]
    assert sorted(fields) == ["cases[0].grad", "composition[3].impl.arch", "model.family"]


def test_order_of_entries_is_one(edited, contract):
    swapped = plain(contract)["composition"]
    swapped[0], swapped[1] = swapped[1], swapped[0]
    with pytest.raises(ContractError, match="^composition is in another order"):
        decode(canonical(edited("composition", to=swapped)))


@pytest.mark.parametrize("number", ["1.0", "1e3", "NaN", "Infinity", "-Infinity", "-0.0"])
def test_no_floats(contract, number):
    raw = encode(contract).decode().replace('"version":1', f'"version":{number}', 1)
    with pytest.raises(ContractError, match=rf"^composition\[0\].impl.version is {number}; .*float_bits"):
        decode(raw)


def test_a_key_given_twice(contract):
    raw = encode(contract).decode().replace('"version":1', '"version":1,"version":1', 1)
    with pytest.raises(ContractError, match=r"^composition\[0\].impl.version is given more than once"):
        decode(raw)


def test_other_spellings(contract):
    raw = encode(contract)
    text, data = raw.decode(), plain(contract)
    assert "größe" in text
    spellings = [
        text + "\n",
        " " + text,
        text.replace(":", ": ", 1),
        json.dumps(data, sort_keys=True, separators=(",", ":")),  # escapes what UTF-8 can hold
        json.dumps(data, separators=(",", ":"), ensure_ascii=False),  # keys in another order
        text.replace('"tp":1', '"tp":-0', 1).replace('"tp":-0', '"tp":1 ', 1),
    ]
    for other in spellings:
        with pytest.raises(ContractError, match="^the contract is not canonical JSON: .* at byte [0-9]+"):
            decode(other)
        with pytest.raises(ContractError):
            decode(other.encode())


@pytest.mark.parametrize(
    "broken",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:-1],
        lambda raw: b"",
        lambda raw: b"\xef\xbb\xbf" + raw,
        lambda raw: raw.replace("ö".encode(), b"\xf6"),
        lambda raw: raw.decode().encode("utf-16"),
        lambda raw: raw + raw,
        lambda raw: b"[" * 100_000,
        lambda raw: raw.replace(b'"version":1', b'"version":' + b"9" * 5000, 1),
        lambda raw: raw.decode().replace("ö", "\udcf6"),
        lambda raw: None,
        lambda raw: bytearray(raw),
    ],
)
def test_what_is_not_json_in_utf8(contract, broken):
    with pytest.raises(ContractError):
        decode(broken(encode(contract)))


@pytest.mark.parametrize("other", [b"null", b"[]", b"{}", b"1", b'"x"'])
def test_json_that_is_no_contract(other):
    with pytest.raises(ContractError):
        decode(other)


def test_only_a_sealed_contract_has_bytes(contract):
    for wrong in (dataclasses.replace(contract, identities=None), None, plain(contract)):
        with pytest.raises(ContractError):
            encode(wrong)
    assert isinstance(decode(encode(contract)), Contract)


@quick
@given(st.recursive(st.none() | scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(words, x, max_size=3)))
def test_any_plain_data_has_one_spelling(data):
    assert parse(canonical(data)) == data


def test_what_has_no_spelling():
    loop: list = []
    loop.append(loop)
    for wrong in ({"a": 0.5}, {"a": [float("nan")]}, {1: 2}, {"a": (1,)}, {"a": b""}, {"a": 2**70}, loop):
        with pytest.raises(ContractError):
            canonical(wrong)
