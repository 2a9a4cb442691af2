"""Weights from a trainer to engine workers over gloo. Both ends are here, and need torch but no vLLM.

Tensors travel in buckets: bytes of consecutive tensors, then the SHA-256 of their names, types, shapes and bytes. Both
ends cut the same buckets from the same metadata, and the receiver checks each digest before it uses a byte: a sender
that walks its tensors in another order than it announced is found, and named.
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

BUCKET_BYTES = 64 * 2**20
"""Default payload of a bucket; a larger tensor has a bucket of its own."""
TIMEOUT = datetime.timedelta(seconds=300)
_DIGEST_BYTES = 32


class TransferError(RuntimeError):
    """The received tensors are not those that were announced."""


@dataclass(frozen=True, kw_only=True)
class Announced:
    """One tensor, as the metadata of an update describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def line(self) -> bytes:
        """What the digest says about the tensor, beside its bytes."""
        return f"{self.name} {self.dtype} {list(self.shape)}\n".encode()


def announce(names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Announced]:
    """The tensors of an update; ValueError if the lists disagree in length or name no dtype of torch."""
    if not len(names) == len(dtype_names) == len(shapes):
        raise ValueError(f"{len(names)} names, {len(dtype_names)} dtype_names and {len(shapes)} shapes do not fit")
    tensors = []
    for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
        dtype = getattr(torch, dtype_name.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name}: {dtype_name!r} is not a dtype of torch")
        tensors.append(Announced(name=name, dtype=dtype, shape=tuple(shape)))
    return tensors


class GlooGroup:
    """A process group beside any that the process already has: rank 0 is the trainer, the others are workers."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout: datetime.timedelta = TIMEOUT):
        self.rank, self.world_size = rank, world_size
        self._store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("isoexec-weights", self._store), rank, world_size, timeout)

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Fills `buffer` (uint8, contiguous, on the CPU) on every rank with rank 0's."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([buffer], options).wait()


def _start_bucket(size: int, added: int, limit: int) -> bool:
    return size > 0 and size + added > limit


def send(group: GlooGroup, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Broadcasts (name, full tensor) pairs from rank 0, in their order; tensors may be on any device."""
    pending: list[tuple[Announced, torch.Tensor]] = []
    size = 0

    def flush() -> None:
        digest, parts = hashlib.sha256(), []
        for tensor, data in pending:
            digest.update(tensor.line())
            digest.update(memoryview(data.numpy()))
            parts.append(data)
        parts.append(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8))
        group.broadcast(torch.cat(parts))
        pending.clear()

    for name, tensor in tensors:
        described = Announced(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
        if _start_bucket(size, described.nbytes, bucket_bytes):
            flush()
            size = 0
        pending.append((described, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)))
        size += described.nbytes
    if pending:
        flush()


def receive(
    group: GlooGroup, tensors: Sequence[Announced], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yields what `send` broadcasts, bucket by bucket, in memory of its own.

    After a bad bucket nothing more is yielded; the rest is received, so that the sender is not left waiting, and then
    TransferError names the bucket.
    """
    buckets: list[list[Announced]] = [[]]
    size = 0
    for tensor in tensors:
        if _start_bucket(size, tensor.nbytes, bucket_bytes):
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    bad: TransferError | None = None
    for bucket in filter(None, buckets):
        try:
            received = _receive_bucket(group, bucket)
        except TransferError as error:
            bad = bad or error
        if bad is None:
            yield received
    if bad is not None:
        raise bad


def _receive_bucket(group: GlooGroup, bucket: Sequence[Announced]) -> list[tuple[str, torch.Tensor]]:
    payload = sum(tensor.nbytes for tensor in bucket)
    buffer = torch.empty(payload + _DIGEST_BYTES, dtype=torch.uint8, device="cpu")
    group.broadcast(buffer)
    digest, start, received = hashlib.sha256(), 0, []
    for tensor in bucket:
        data = buffer[start : start + tensor.nbytes]
        start += tensor.nbytes
        digest.update(tensor.line())
        digest.update(memoryview(data.numpy()))
        aligned = data.clone() if data.storage_offset() % tensor.dtype.itemsize else data
        received.append((tensor.name, aligned.view(tensor.dtype).view(tensor.shape)))
    if digest.digest() != bytes(buffer[payload:].tolist()):
        names = ", ".join(tensor.name for tensor in bucket)
        raise TransferError(f"names, types, shapes or bytes differ from what was sent, in the bucket of: {names}")
    return received


class GlooTransfer:
    """The trainer's side, called as SkyRL calls vLLM's NCCL engine."""

    @staticmethod
    def trainer_init(init_info: Mapping[str, Any]) -> GlooGroup:
        """Joins the group as rank 0; waits for all workers. `init_info`: master_address, master_port, world_size."""
        return GlooGroup(init_info["master_address"], init_info["master_port"], 0, init_info["world_size"])

    @staticmethod
    def trainer_send_weights(iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: Mapping[str, Any]) -> None:
        """Sends all tensors of an update. `trainer_args`: group, and packed and bucket_bytes as in the update."""
        unknown = sorted(trainer_args.keys() - {"group", "packed", "bucket_bytes"})
        if unknown:
            raise ValueError(f"trainer_args: unknown keys {unknown}")
        packed, limit = trainer_args.get("packed", False), trainer_args.get("bucket_bytes", BUCKET_BYTES)
        send(trainer_args["group"], iterator, limit if packed else 0)
