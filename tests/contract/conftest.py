"""A small valid contract: a dense decoder whose logprobs the two sides compute by implementations proven equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_isoexec.contract import (
    CASE_NAMES,
    STATES,
    Claims,
    Contract,
    Discharge,
    Entry,
    Impl,
    Model,
    StateClaim,
    Tolerance,
    TopologyClaim,
    float_bits,
    plain,
    seal,
)

OPS = (
    "embed attn.norm attn.q_proj attn.k_proj attn.v_proj attn.q_norm attn.k_norm attn.rope attn.core attn.o_proj "
    "attn.residual mlp.norm mlp.gate_proj mlp.up_proj mlp.act mlp.down_proj mlp.residual final_norm lm_head logprob"
).split()
REGIONS = {
    "embedding": "embed",
    "rmsnorm": "attn.norm attn.q_norm attn.k_norm attn.residual mlp.norm mlp.residual final_norm",
    "linear": "attn.q_proj attn.k_proj attn.v_proj mlp.gate_proj mlp.up_proj lm_head",
    "rope": "attn.rope",
    "attention": "attn.core",
    "row_linear": "attn.o_proj mlp.down_proj",
    "swiglu": "mlp.act",
}
CONSTANTS = {
    "attention": {"kv_block": 16, "kv_partition": 512},
    "rmsnorm": {"eps": float_bits(1e-6)},
    "row_linear": {"num_leaves": 4, "fused": False, "order": "tree"},
}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def gate(region: str, arch: str = "cpu") -> str:
    return f"gates/{arch}/{region}@{sha(region)[:16]}"


def entry(name: str, ops: str, cases: tuple[str, ...] = CASE_NAMES, discharge: str | None = None) -> Entry:
    op = name.partition(".")[0]
    return Entry(
        region=tuple(ops.split()),
        cases=cases,
        impl=Impl(id=name, version=1, arch="cpu", source=sha(name)),
        constants=CONSTANTS.get(op, {}),
        gate=gate(op),
        discharge=None if discharge is None else Discharge(kind="gate", ref=discharge),
    )


def example() -> Contract:
    claims = Claims(
        topology=(
            TopologyClaim(axis="tp", kind="invariant", degrees=(1, 2, 4), proof=(gate("row_linear"), gate("logprob"))),
            TopologyClaim(axis="dp", kind="invariant", degrees=(1, 2), proof=(gate("decoder"),)),
            TopologyClaim(axis="pp", kind="invariant", degrees=(1, 2), proof=(gate("decoder"),)),
            *(TopologyClaim(axis=axis, kind="pinned", degrees=(1,)) for axis in ("ep", "sp", "cp")),
        ),
        state=tuple(StateClaim(state=state, invalidated_by=("weight_sync", "wake_up")) for state in STATES),
        tolerances=(Tolerance(name="report", boundary="metrics to report", bound=float_bits(1e-6)),),
    )
    contract = Contract(
        model=Model(
            family="qwen3",
            dtype="float32",
            ops=tuple(OPS),
            fields={
                "family": "qwen3",
                "dtype": "float32",
                "hidden_size": 64,
                "qk_norm": True,
                "rms_norm_eps": float_bits(1e-6),
                "rope_scaling": None,
            },
        ),
        composition=(
            *(entry(f"{op}.cpu", ops) for op, ops in REGIONS.items()),
            entry("logprob.cpu", "logprob", CASE_NAMES[:2], gate("decoder")),
            entry("logprob.rows", "logprob", CASE_NAMES[2:], gate("decoder")),
        ),
        versions={"torch": "2.11.0", "numba": "0.65.0"},
        sources={"model": sha("model"), "patches/vllm": sha("vllm")},
        claims=claims,
        deployment={
            "trainer": {"tp": 2, "pp": 1, "dp": 1, "ep": 1, "recompute": True},
            "engine": {"tp": 1, "num": 2, "block_size": 16},
            "environment": {"OMP_NUM_THREADS": "1", "NCCL_ALGO": None, "größe": ""},
        },
    )
    return seal(contract)


def leaves(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(path, value) of everything in plain data that holds nothing."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    if not items:
        yield path, data
    for step, value in items:
        yield from leaves(value, (*path, step))


@pytest.fixture(scope="session")
def contract() -> Contract:
    """Valid and sealed."""
    return example()


@pytest.fixture(scope="session")
def paths(contract: Contract) -> list[tuple[tuple[str | int, ...], Any]]:
    """Every leaf of the contract's plain data: (path, value)."""
    return list(leaves(plain(contract)))


@pytest.fixture(scope="session")
def edited(contract: Contract):
    """edited(*path, to=value): plain data of the contract with one value put, or taken out if it is `...`."""

    def edit(*path: str | int, to: Any) -> dict[str, Any]:
        data = plain(contract)
        owner = data
        for step in path[:-1]:
            owner = owner[step]
        if to is ...:
            del owner[path[-1]]
        else:
            owner[path[-1]] = to
        return data

    return edit
