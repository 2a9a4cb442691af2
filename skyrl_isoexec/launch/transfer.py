"""Weights on their way from our trainer to the engines: the extractor that reads them, SkyRL's transfer interface over
gloo, and the proof around whichever sender SkyRL has chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from skyrl.backends.skyrl_train.weight_sync import (
    BroadcastInitInfo,
    BroadcastTransferStrategy,
    WeightChunk,
    WeightExtractor,
    WeightTransferSender,
)

from ..runtimes.megatron.weights import dtypes, export, shapes
from ..runtimes.vllm.transfer import GlooTransfer
from .sync import SyncProof

CHUNK_BYTES = 256 * 2**20
"""Size of a chunk between devices, where every chunk is a message of its own; a larger tensor has one of its own."""


class Extractor(WeightExtractor):
    """Full tensors of a Megatron policy, in chunks, under checkpoint names. Collective over all ranks.

    Tensors of one module are in one chunk: an engine puts a module's tensors in place when it has all of them, and may
    read a chunk's memory only while it lasts.
    """

    def __init__(self, module: torch.nn.Module, chunk_bytes: int = 0) -> None:
        self._module, self._chunk_bytes = module, chunk_bytes

    def get_weight_metadata(self, dtype: torch.dtype) -> dict[str, list]:
        """Names, dtype names and shapes of what `extract_weights` yields, in its order."""
        found, kinds = shapes(self._module), dtypes(self._module, dtype)
        return {
            "names": list(found),
            "dtype_names": [str(kinds[name]).removeprefix("torch.") for name in found],
            "shapes": [list(shape) for shape in found.values()],
        }

    def extract_weights(self, dtype: torch.dtype) -> Iterator[WeightChunk]:
        """The tensors, cast to the engine's dtype, but for what is fp32 in a model of any dtype."""
        for chunk in chunked(export(self._module, dtype), self._chunk_bytes):
            names, tensors = zip(*chunk, strict=True)
            shapes, kinds = [list(tensor.shape) for tensor in tensors], [str(tensor.dtype) for tensor in tensors]
            yield WeightChunk(names=list(names), dtypes=kinds, shapes=shapes, tensors=list(tensors))


def chunked(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The pairs in their order, as many modules at a time as have `limit` bytes together, but at least one.

    With a limit of 0, one tensor at a time.
    """
    chunk: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        begins = not chunk or name.rpartition(".")[0] != chunk[-1][0].rpartition(".")[0]
        if chunk and (limit == 0 or (begins and size + tensor.nbytes > limit)):
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk


class ProvenSender(WeightTransferSender):
    """A sender of SkyRL's between devices, with a proof around each of its updates: see `SyncProof`."""

    def __init__(self, inner: WeightTransferSender, proof: SyncProof | None) -> None:
        self._inner, self.proof = inner, proof

    async def send_chunks(self, chunks: Iterable[WeightChunk], weight_metadata: dict[str, list] | None = None) -> None:
        """Send one update of all tensors; only rank 0 has a proof, the other ranks wait for it."""
        if self.proof is None:
            await self._inner.send_chunks(chunks, weight_metadata)
        else:
            await asyncio.to_thread(self.proof.begin)
            await self._inner.send_chunks(self.proof.watch_chunks(chunks), weight_metadata)
            await asyncio.to_thread(self.proof.finish)
        dist.barrier()

    def teardown(self) -> None:
        """As the sender's."""
        self._inner.teardown()


def proven(sender: WeightTransferSender, client: Any, contract_digest: str, epoch: Callable[[], int]) -> Any:
    """The sender with a proof of each update, on rank 0, which drives the engines."""
    if isinstance(sender, GlooSender):
        sender.prove(contract_digest, epoch)
        return sender
    proof = SyncProof(client.server_urls, contract_digest, epoch) if dist.get_rank() == 0 else None
    return ProvenSender(sender, proof)


class GlooSender(WeightTransferSender):
    """Rank 0 of the trainer drives the servers and broadcasts; the other ranks take part in gathering."""

    def __init__(self, group: Any, client: Any) -> None:
        self._group, self._client = group, client
        self.proof: SyncProof | None = None

    def prove(self, contract_digest: str, epoch: Callable[[], int]) -> None:
        """From here on every update is proven: see `SyncProof`. For all ranks; rank 0 does it."""
        if dist.get_rank() == 0:
            self.proof = SyncProof(self._client.server_urls, contract_digest, epoch)

    async def send_chunks(self, chunks: Iterable[WeightChunk], weight_metadata: dict[str, list] | None = None) -> None:
        """Send one update of all tensors. `weight_metadata` announces them."""
        if weight_metadata is None:
            raise ValueError("weight_metadata is missing: the receivers must know what is sent to them")
        tensors = ((name, t) for chunk in chunks for name, t in zip(chunk.names, chunk.tensors, strict=True))
        if dist.get_rank() == 0:
            if self.proof is not None:
                await asyncio.to_thread(self.proof.begin)
                tensors = self.proof.watch(tensors)
            await self._client.start_weight_update(is_checkpoint_format=True)
            receive = asyncio.create_task(self._client.update_weights_nccl({**weight_metadata, "packed": True}))
            arguments = {"group": self._group, "packed": True}
            await asyncio.to_thread(GlooTransfer.trainer_send_weights, iterator=tensors, trainer_args=arguments)
            await receive
            await self._client.finish_weight_update()
            if self.proof is not None:
                await asyncio.to_thread(self.proof.finish)
        else:
            for _ in tensors:
                pass
        dist.barrier()

    def teardown(self) -> None:
        """Leave the transfer group."""
        self._group = None


class GlooStrategy(BroadcastTransferStrategy):
    """SkyRL's broadcast strategy with vLLM's gloo transfer engine of this package at the other end."""

    @staticmethod
    def create_sender(init_info: BroadcastInitInfo, inference_client: Any) -> GlooSender:
        """Rank 0 joins the transfer group, which waits for every engine worker."""
        group = None
        if dist.get_rank() == 0:
            group = GlooTransfer.trainer_init(
                {
                    "master_address": init_info.master_addr,
                    "master_port": init_info.master_port,
                    "world_size": init_info.world_size,
                }
            )
        return GlooSender(group, inference_client)

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        """The receiver's class."""
        from ..runtimes.vllm.weights import GlooWeightTransferEngine

        return GlooWeightTransferEngine
