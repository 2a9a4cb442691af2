"""Which sampling parameters a request may have whose tokens a trainer scores, and the guard's words about others."""

from types import SimpleNamespace

import pytest

from skyrl_isoexec.contract import float_bits
from skyrl_isoexec.runtimes.vllm.guard import Guard, GuardError
from skyrl_isoexec.runtimes.vllm.sampling import NEUTRAL, changes, contract_temperature

BITS = float_bits(0.7)
MOVED = {
    "temperature": (0.0, 1, 1.0, 0.7000000000000001, None, "0.7"),
    "top_p": (0.9, 0.9999999999),
    "top_k": (1, 50),
    "min_p": (0.1, 1e-9),
    "repetition_penalty": (1.1,),
    "presence_penalty": (0.5, -0.5),
    "frequency_penalty": (0.5,),
    "min_tokens": (1,),
    "logit_bias": ({3: 1.0},),
    "allowed_token_ids": ([1, 2],),
    "bad_words": (["no"],),
    "_bad_words_token_ids": ([[4]],),
    "structured_outputs": (SimpleNamespace(regex="a"),),
    "thinking_token_budget": (5,),
}


def admitted(guard_temperature: str | None, **changed: object) -> Guard:
    """A guard of epoch 3 that was asked for one request."""
    guard = Guard(guard_temperature)
    guard.begin_sync(3)
    guard.proven = True
    guard.commit(3)
    extra = {"isoexec_epoch": 3, "isoexec_scored": True} | changed.pop("extra_args", {})
    fields = {name: allowed[0] for name, allowed in NEUTRAL.items()} | {"temperature": 0.7} | changed
    guard.admit("a", SimpleNamespace(extra_args=extra, **fields))
    return guard


def test_every_field_has_a_case() -> None:
    """None is forgotten here."""
    assert MOVED.keys() == NEUTRAL.keys() | {"temperature"}


def test_the_contracts_distribution_is_served() -> None:
    """With each of the values that mean "off"."""
    assert admitted(BITS).requests == {"a"}
    for name, allowed in NEUTRAL.items():
        for value in allowed:
            assert admitted(BITS, **{name: value}).requests == {"a"}
    assert admitted(BITS, seed=7, max_tokens=1, stop=["x"], n=1, logprobs=0).requests == {"a"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in MOVED.items() for value in values])
def test_another_distribution(name: str, value: object) -> None:
    """One line with the field and both values; evaluation, and an engine without a contract, may do it."""
    with pytest.raises(GuardError) as refusal:
        admitted(BITS, **{name: value})
    said = str(refusal.value)
    assert said.startswith(f"isoexec refused: request a: sampling_params.{name} is {value!r}") and "\n" not in said
    assert (BITS if name == "temperature" else repr(NEUTRAL[name][0])) in said
    assert admitted(BITS, **{name: value}, extra_args={"isoexec_scored": False}).requests == {"a"}
    assert admitted(None, **{name: value}).requests == {"a"}


@pytest.mark.parametrize("given", [None, 1, 0, "true", "False"])
def test_a_request_says_whether_it_is_scored(given: object) -> None:
    """Nothing is taken for granted, with a contract and without."""
    for temperature in (BITS, None):
        with pytest.raises(GuardError, match=f"isoexec_scored is {given!r}, neither True nor False; say with every"):
            admitted(temperature, extra_args={"isoexec_scored": given})


def test_no_parameters_at_all() -> None:
    """A request of another kind than text generation."""
    guard = Guard(BITS)
    with pytest.raises(GuardError, match="isoexec_epoch is None"):
        guard.admit("a", None)


def test_vllms_own_parameters() -> None:
    """Its fields have these names, and its defaults are neutral; each of its ways to cut is found."""
    sampling = pytest.importorskip("vllm").SamplingParams
    assert changes(sampling(temperature=0.7), BITS) is None
    assert changes(sampling(temperature=0.7, top_k=-1, max_tokens=5, seed=1, stop_token_ids=[1]), BITS) is None
    for name, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("min_tokens", 1), ("presence_penalty", 1.0)):
        assert changes(sampling(temperature=0.7, **{name: value}), BITS).startswith(f"sampling_params.{name} is")
    assert "temperature is 1.0" in changes(sampling(), BITS)
    assert "temperature" in changes(sampling(temperature=0.0), BITS)
    for name, value in (("logit_bias", {1: 2.0}), ("allowed_token_ids", [1]), ("bad_words", ["no"])):
        assert name in changes(sampling(temperature=0.7, **{name: value}), BITS)
    assert "top_p is absent" in changes(SimpleNamespace(temperature=0.7), BITS)


def test_the_temperature_of_a_contract(contract) -> None:
    """Read from the composition; several would be no choice."""
    import dataclasses

    made = contract("float32")
    assert contract_temperature(made) == float_bits(1.0) and contract_temperature(None) is None
    entry = next(entry for entry in made.composition if "temperature" in entry.constants)
    other = dataclasses.replace(entry, constants={**entry.constants, "temperature": BITS})
    with pytest.raises(ValueError, match="has the temperatures"):
        contract_temperature(dataclasses.replace(made, composition=(*made.composition, other)))
