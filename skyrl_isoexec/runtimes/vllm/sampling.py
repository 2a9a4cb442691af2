"""What may decide a token whose log-probability a trainer will score: the contract's temperature, and nothing else.

vLLM's log-probabilities are taken after the temperature and after every cut, penalty and bias; a trainer knows only of
the temperature. Needs no vLLM: of its parameters of a request only names are read.
"""

from __future__ import annotations

from typing import Any

from skyrl_isoexec.contract import Contract, float_bits

SCORED = "isoexec_scored"
"""Key in a request's `sampling_params.extra_args`: whether a trainer scores its tokens. True or False, never absent."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "_bad_words_token_ids": (None, []),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
}
"""Fields of vLLM's parameters that move a distribution -> values with which they do not."""


def scored(params: Any) -> object:
    """What a request says of itself; None for nothing."""
    return (getattr(params, "extra_args", None) or {}).get(SCORED)


def changes(params: Any, temperature: str) -> str | None:
    """The first field that takes a request away from the contract's distribution, with both values; None for none.

    `temperature` is the contract's, as bits.
    """
    found = getattr(params, "temperature", None)
    if not isinstance(found, (int, float)) or float_bits(float(found)) != temperature:
        bits = float_bits(float(found)) if isinstance(found, (int, float)) else "no number"
        return f"sampling_params.temperature is {found!r} ({bits}), the contract says {temperature}"
    for name, allowed in NEUTRAL.items():
        if not hasattr(params, name):
            return f"sampling_params.{name} is absent, the contract says {allowed[0]!r}"
        if (value := getattr(params, name)) not in allowed:
            return f"sampling_params.{name} is {value!r}, the contract says {allowed[0]!r}"
    return None


def contract_temperature(contract: Contract | None) -> str | None:
    """Bits of the one temperature of a composition; None without a contract. ValueError for none, or for several."""
    if contract is None:
        return None
    found = {entry.constants["temperature"] for entry in contract.composition if "temperature" in entry.constants}
    if len(found) != 1:
        raise ValueError(f"the contract has the temperatures {sorted(map(str, found))}, not one")
    return str(*found)
