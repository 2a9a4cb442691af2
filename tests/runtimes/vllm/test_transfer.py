"""The gloo transfer by itself, both ends in one process: what is sent is what arrives, or it is refused."""

import socket
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from skyrl_isoexec.runtimes.vllm.transfer import (  # noqa: E402
    GlooGroup,
    GlooTransfer,
    TransferError,
    announce,
    receive,
)

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.tensor([float("nan"), -0.0, 1e-40, float("inf")]),
    "c": torch.randn(7, 3).to(torch.bfloat16).t(),
    "d": torch.arange(4, dtype=torch.int64),
    "e": torch.tensor(2.5),
    "f": torch.empty(0, 4),
    "g": torch.randn(1).to(torch.bfloat16),
    "h": torch.randn(33),
}


@pytest.fixture
def groups():
    """groups(world size) -> the group of each rank."""

    def join(size: int = 2) -> list[GlooGroup]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        joined: dict[int, GlooGroup] = {}

        def work(rank: int) -> None:
            joined[rank] = (
                GlooTransfer.trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": size})
                if rank == 0
                else GlooGroup("127.0.0.1", port, rank, size)
            )

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [joined[rank] for rank in range(size)]

    return join


def send_in_background(group: GlooGroup, tensors: dict, **arguments: object) -> threading.Thread:
    """The trainer's call in a thread of its own."""
    thread = threading.Thread(
        target=GlooTransfer.trainer_send_weights, args=(iter(tensors.items()), {"group": group, **arguments})
    )
    thread.start()
    return thread


def announced(tensors: dict) -> list:
    """The metadata that SkyRL sends ahead of the tensors."""
    return announce(
        list(tensors),
        [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        [list(t.shape) for t in tensors.values()],
    )


@pytest.mark.parametrize("limit", [0, 1, 64, 100, 2**26])
def test_all_bytes_arrive(groups, limit: int) -> None:
    """Every dtype, a scalar, an empty and a strided tensor, whatever shares a bucket, on two receivers."""
    trainer, *workers = groups(3)
    sender = send_in_background(trainer, TENSORS, packed=limit > 0, bucket_bytes=limit or 1)
    got: list[dict] = [{}, {}]

    def take(index: int) -> None:
        for bucket in receive(workers[index], announced(TENSORS), limit):
            got[index].update(bucket)

    other = threading.Thread(target=take, args=(1,))
    other.start()
    take(0)
    other.join(30)
    sender.join(30)
    for received in got:
        assert list(received) == list(TENSORS)
        for name, sent in TENSORS.items():
            assert received[name].dtype == sent.dtype and received[name].shape == sent.shape
            assert (
                received[name].contiguous().view(-1).view(torch.uint8).tolist()
                == sent.contiguous().view(-1).view(torch.uint8).tolist()
            )


def test_another_order_is_found(groups) -> None:
    """Two tensors of one shape, announced in one order and sent in the other."""
    trainer, worker = groups()
    pair = {"gate": torch.zeros(4), "up": torch.zeros(4)}
    sender = send_in_background(trainer, dict(reversed(pair.items())), packed=True)
    with pytest.raises(TransferError, match="gate, up"):
        list(receive(worker, announced(pair)))
    sender.join(30)


def test_metadata_is_checked() -> None:
    """Lists of different lengths and unknown dtypes are refused before anything is received."""
    with pytest.raises(ValueError, match="2 names, 1 dtype_names"):
        announce(["a", "b"], ["float32"], [[1], [1]])
    with pytest.raises(ValueError, match="a: 'float33'"):
        announce(["a"], ["float33"], [[1]])
    with pytest.raises(ValueError, match="unknown keys \\['stream'\\]"):
        GlooTransfer.trainer_send_weights([], {"group": None, "stream": None})


def test_a_trainer_needs_no_vllm() -> None:
    """Sender and settings import neither vLLM nor, for the settings, torch."""
    code = (
        "import sys, skyrl_isoexec.runtimes.vllm.settings as s; assert 'torch' not in sys.modules; "
        "import skyrl_isoexec.runtimes.vllm.transfer; assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
