"""What arrived is compared with what was sent, part by part, and nothing missing or extra passes."""

import pytest
import torch

from skyrl_isoexec.launch import sync
from skyrl_isoexec.launch.sync import SyncProof, SyncRefused, differing
from skyrl_isoexec.model.digest import tensor_digest


class Engines:
    """Two workers that hold halves of `w` and a whole `b`, as the rpc route would show them."""

    def __init__(self) -> None:
        self.full = {"w": torch.arange(8.0).view(4, 2), "b": torch.ones(3)}
        self.held = [{"w": self.full["w"][2 * r : 2 * r + 2].clone(), "b": self.full["b"].clone()} for r in range(2)]
        self.calls: list[tuple[str, dict]] = []

    def call(self, urls: list[str], method: str, **arguments: object) -> dict:
        self.calls.append((method, arguments))
        if method not in ("isoexec_arrived", "isoexec_places"):
            return {}
        return {
            f"engine 0 rank {rank}": {
                name: {
                    "dim": 0 if name == "w" else None,
                    "parts": 2 if name == "w" else 1,
                    "blocks": [],
                    "rank": rank if name == "w" else 0,
                    **(held_as(tensor) if method == "isoexec_arrived" else {}),
                }
                for name, tensor in held.items()
            }
            for rank, held in enumerate(self.held)
        }


def held_as(tensor: torch.Tensor) -> dict:
    """What a worker says of a tensor that it holds."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "digest": tensor_digest(tensor)}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    found = Engines()
    monkeypatch.setattr(sync, "call", found.call)
    return found


def synced(engines: Engines, sent: dict[str, torch.Tensor]) -> SyncProof:
    proof = SyncProof(["http://engine"], "contract", lambda: 7)
    proof.begin()
    assert dict(proof.watch(iter(sent.items()))).keys() == sent.keys()
    return proof


def test_equal_weights_are_released(engines: Engines) -> None:
    synced(engines, engines.full).finish()
    assert ("isoexec_begin_sync", {"epoch": 7}) in engines.calls
    assert engines.calls[-1] == ("isoexec_commit", {"epoch": 7, "contract_digest": "contract"})


def test_a_sleeping_engine_is_not_read(engines: Engines) -> None:
    synced(engines, engines.full)
    assert [method for method, _ in engines.calls] == ["isoexec_places", "isoexec_begin_sync"]


def test_one_flipped_bit_names_tensor_and_process(engines: Engines) -> None:
    proof = synced(engines, engines.full)
    engines.held[1]["w"].view(torch.int32)[0, 0] ^= 1
    with pytest.raises(SyncRefused, match=r"epoch 7: engine 0 rank 1: w is float32 .* sent was float32"):
        proof.finish()
    assert engines.calls[-1][0] == "isoexec_arrived"  # not committed


def test_parts_that_changed_places_are_found(engines: Engines) -> None:
    proof = synced(engines, engines.full)
    engines.held.reverse()
    with pytest.raises(SyncRefused, match="rank 0: w is .*; engine 0 rank 1: w is"):
        proof.finish()


def test_dropped_and_renamed_tensors_are_named(engines: Engines) -> None:
    proof = synced(engines, {"w": engines.full["w"], "c": engines.full["b"]})
    with pytest.raises(SyncRefused, match="rank 0 holds b, part 0 of 1, which was not sent"):
        proof.finish()


def test_another_type_with_the_same_bytes_is_found(engines: Engines) -> None:
    proof = synced(engines, engines.full)
    engines.held[0]["b"] = engines.held[0]["b"].view(torch.int32)
    with pytest.raises(SyncRefused, match="rank 0: b is int32 .* sent was float32"):
        proof.finish()


def test_nothing_to_compare_is_a_difference() -> None:
    assert differing({}, {}) == ["no engine worker answered"]
    assert differing({}, {"engine 0 rank 0": {}}) == ["engine 0 rank 0 holds no tensor"]
    other = differing({("w", None, 1, 0): "1"}, {"engine 0 rank 0": {"b": part(b"2")}})
    assert other[0] == "engine 0 rank 0 holds no w, which was sent"


def part(digest: bytes) -> dict:
    return {"dim": None, "parts": 1, "blocks": [], "rank": 0, "dtype": "float32", "shape": [3], "digest": digest.hex()}
