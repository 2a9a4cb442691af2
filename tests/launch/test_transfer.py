"""Chunks keep modules together, and a proof is around whichever sender sends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from skyrl.backends.skyrl_train.weight_sync import WeightChunk

from skyrl_isoexec.launch import sync, transfer
from skyrl_isoexec.launch.sync import SyncRefused
from skyrl_isoexec.launch.transfer import Extractor, ProvenSender, chunked, proven
from skyrl_isoexec.model.digest import tensor_digest

TENSORS = [(name, torch.ones(4)) for name in ("a.weight", "a.bias", "b.weight", "c.weight")]


@pytest.mark.parametrize(
    ("limit", "sizes"), [(0, [1, 1, 1, 1]), (16, [2, 1, 1]), (32, [2, 2]), (48, [3, 1]), (64, [4]), (1, [2, 1, 1])]
)
def test_modules_are_not_torn_apart(limit: int, sizes: list[int]) -> None:
    chunks = list(chunked(TENSORS, limit))
    assert [len(chunk) for chunk in chunks] == sizes
    assert [pair for chunk in chunks for pair in chunk] == TENSORS


def test_every_tensor_is_announced_in_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router's bias is float32 beside bfloat16."""
    tensors = {"gate.weight": torch.ones(2, 3).bfloat16(), "gate.bias": torch.ones(2)}
    monkeypatch.setattr(transfer, "shapes", lambda module: {name: tuple(t.shape) for name, t in tensors.items()})
    monkeypatch.setattr(transfer, "dtypes", lambda module, dtype: {name: t.dtype for name, t in tensors.items()})
    monkeypatch.setattr(transfer, "export", lambda module, dtype: iter(tensors.items()))
    extractor = Extractor(torch.nn.Module(), chunk_bytes=100)
    announced = extractor.get_weight_metadata(torch.bfloat16)
    assert announced == {"names": [*tensors], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [2]]}
    (chunk,) = extractor.extract_weights(torch.bfloat16)
    assert chunk.dtypes == ["torch.bfloat16", "torch.float32"] and chunk.tensors == list(tensors.values())


class Engine:
    """One worker with all tensors; `sent` is what a sender between devices would bring it."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {name: torch.zeros(4) for name, _ in TENSORS}
        self.calls: list[str] = []

    def call(self, urls: list[str], method: str, **_: object) -> dict[str, Any]:
        self.calls.append(method)
        places = {name: {"dim": None, "parts": 1, "blocks": [], "rank": 0} for name in self.held}
        if method == "isoexec_arrived":
            places = {name: place | described(self.held[name]) for name, place in places.items()}
        return {"engine 0 rank 0": places} if method in ("isoexec_arrived", "isoexec_places") else {}

    async def send_chunks(self, chunks: Any, weight_metadata: Any = None) -> None:
        self.calls.append("send")
        for chunk in chunks:
            self.held.update(zip(chunk.names, chunk.tensors, strict=True))


def described(tensor: torch.Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "digest": tensor_digest(tensor)}


def chunks() -> list[WeightChunk]:
    pairs = [
        (list(names), list(tensors)) for names, tensors in (zip(*chunk, strict=True) for chunk in chunked(TENSORS, 16))
    ]
    return [
        WeightChunk(names=names, dtypes=["torch.float32"] * len(names), shapes=[[4]] * len(names), tensors=tensors)
        for names, tensors in pairs
    ]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(sync, "call", made.call)
    monkeypatch.setattr(transfer.dist, "barrier", lambda: made.calls.append("barrier"))
    return made


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_proves_what_a_device_sender_sends(rank: int, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.dist, "get_rank", lambda: rank)
    sender = proven(engine, SimpleNamespace(server_urls=["http://engine"]), "contract", lambda: 3)
    assert isinstance(sender, ProvenSender)
    asyncio.run(sender.send_chunks(chunks()))
    proof = ["isoexec_places", "isoexec_begin_sync", "send", "isoexec_arrived", "isoexec_commit"]
    assert engine.calls == [*(proof if rank == 0 else ["send"]), "barrier"]


def test_a_wrong_tensor_is_not_committed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.dist, "get_rank", lambda: 0)
    sender = proven(engine, SimpleNamespace(server_urls=["http://engine"]), "contract", lambda: 3)
    real = engine.send_chunks

    async def damaged(chunks: Any, weight_metadata: Any = None) -> None:
        await real(chunks)
        engine.held["b.weight"] = torch.zeros(4)

    monkeypatch.setattr(engine, "send_chunks", damaged)
    with pytest.raises(SyncRefused, match="epoch 3: engine 0 rank 0: b.weight is float32"):
        asyncio.run(sender.send_chunks(chunks()))
    assert "isoexec_commit" not in engine.calls
