"""The proof of a weight sync: what every engine worker holds afterwards is, tensor by tensor, what the trainer sent.

An engine is told the epoch of an update before it begins, and that it holds it only after its own digests were compared
here. Until then, and after any failure, it refuses to generate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..model.digest import tensor_digest
from ..model.shard import Shard
from .engines import call

MAX_SHOWN = 5
Key = tuple[str, Shard, int]
"""Name of a tensor, how it is cut, and the rank whose part is meant."""


class SyncRefused(RuntimeError):
    """The weights that arrived are not those that were sent."""


def described(tensor: torch.Tensor) -> str:
    """Type, shape and digest of a tensor, as one text."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} {tensor_digest(tensor)}"


class SyncProof:
    """One trainer's proofs, sync after sync. `urls` are the engines' servers; `epoch` counts the trainer's updates."""

    def __init__(self, urls: Sequence[str], contract_digest: str, epoch: Callable[[], int]) -> None:
        self._urls, self._contract, self._epoch = list(urls), contract_digest, epoch
        self._sent: dict[Key, str] = {}
        self._now = 0
        self.seconds = 0.0
        """Time spent on all proofs so far."""
        held = call(self._urls, "isoexec_places")  # the engines may be asleep, without the memory of their weights
        self._parts = {key_of(name, part) for parts in held.values() for name, part in parts.items()}
        self._wanted: dict[str, list[tuple[Shard, int]]] = {}
        for name, shard, rank in sorted(self._parts, key=str):
            self._wanted.setdefault(name, []).append((shard, rank))

    def begin(self) -> None:
        """Engines forget what they held."""
        with self._timed():
            self._sent, self._now = {}, self._epoch()
            call(self._urls, "isoexec_begin_sync", epoch=self._now)

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same (name, full tensor) pairs; the digest of every part that some worker keeps is noted."""
        for name, tensor in tensors:
            with self._timed():
                for shard, rank in self._wanted.get(name, ()):
                    self._sent[name, shard, rank] = described(shard.slice(tensor, rank))
            yield name, tensor

    def watch_chunks(self, chunks: Iterable[Any]) -> Iterator[Any]:
        """The same chunks, each with `names` and full `tensors`, noted likewise."""
        for chunk in chunks:
            for _ in self.watch(zip(chunk.names, chunk.tensors, strict=True)):
                pass
            yield chunk

    def finish(self) -> None:
        """Compare, and let the engines generate. SyncRefused names every tensor and process that differ."""
        with self._timed():
            self._compare()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def _compare(self) -> None:
        arrived = call(self._urls, "isoexec_arrived")
        problems = differing(self._sent, arrived)
        if problems:
            more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
            raise SyncRefused(
                f"weight sync of epoch {self._now}: {'; '.join(problems[:MAX_SHOWN])}{more}; the engines were not "
                "released: start again from the last checkpoint"
            )
        call(self._urls, "isoexec_commit", epoch=self._now, contract_digest=self._contract)


def key_of(name: str, part: Mapping[str, Any]) -> Key:
    """Which part of which tensor a worker says that it holds."""
    return name, Shard(dim=part["dim"], parts=part["parts"], blocks=tuple(part["blocks"])), part["rank"]


def differing(sent: Mapping[Key, str], arrived: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """One line for every part that a process holds and that is not what was sent; nothing to compare is one, too."""
    problems = []
    names = {name for name, *_ in sent}
    for process, parts in arrived.items():
        if not parts:
            problems.append(f"{process} holds no tensor")
        problems += [f"{process} holds no {name}, which was sent" for name in sorted(names - parts.keys())]
        for name, part in parts.items():
            key = key_of(name, part)
            if key not in sent:
                problems.append(f"{process} holds {name}, part {part['rank']} of {part['parts']}, which was not sent")
            elif sent[key] != (held := f"{part['dtype']} {part['shape']} {part['digest']}"):
                problems.append(f"{process}: {name} is {held[:-48]}, sent was {sent[key][:-48]}")
    return problems if arrived else ["no engine worker answered"]
