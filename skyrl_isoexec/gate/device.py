"""An implementation for a device behind functions that take and give tensors of the host: what a gate is run on.

Notable: inputs are made on the host, so that they are the same bits everywhere, and keep their strides and offsets on
the device. Some calls are kept and made once more in a CUDA graph that is replayed, as an engine does: a result that
another stream, a second launch or memory full of NaN changes is a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from skyrl_isoexec.gate.record import GateError
from skyrl_isoexec.kernels.numeric.proof import Proof

KEPT = 4
"""Calls of one function, of different shapes, that are made again in a graph."""
WRITTEN = {
    "write_kv": (2,),
    "attention_paged": (6,),
    "gdn_paged": (6, 12),
    "write_latent": (1,),
    "mla_paged": (7,),
}
"""Function -> places of the operands, tensors or sequences of them, that it writes into."""


def require_device(arch: str) -> str:
    """The name of the device that an arch's gates run on; GateError where there is none."""
    if arch == "cpu":
        return "cpu"
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if found != (9, 0):
        have = "torch finds no CUDA device" if found is None else f"this one has {found[0]}.{found[1]}"
        raise GateError(f"gate: arch {arch} needs a CUDA device of compute capability 9.0, but {have}")
    return "cuda"


def moved(x: object, device: str) -> object:
    """A tensor on the device with the strides and the offset that it has here, or a sequence of such; else x itself."""
    if isinstance(x, (list, tuple)):
        return type(x)(moved(one, device) for one in x)
    if not isinstance(x, Tensor):
        return x
    if x.requires_grad or x.is_contiguous():
        return x.to(device)
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return flat.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def _write_back(here: object, there: object) -> None:
    if isinstance(here, (list, tuple)):
        for one, other in zip(here, there, strict=True):
            _write_back(one, other)
    elif isinstance(here, Tensor):
        here.copy_(there)


def _back(results: object) -> object:
    if isinstance(results, tuple):
        return tuple(_back(x) for x in results)
    return results.cpu() if isinstance(results, Tensor) else results


class OnDevice:
    """The functions of a module; whatever else it holds is given as it is."""

    def __init__(self, module: ModuleType, device: str) -> None:
        self._module, self._device = module, device
        self._calls: dict[str, dict[tuple, tuple]] = {}

    def __getattr__(self, name: str) -> object:
        value = getattr(self._module, name)
        if not callable(value) or isinstance(value, type):
            return value

        def call(*operands: object, **named: object) -> object:
            there = [moved(x, self._device) for x in operands]
            named = {key: moved(x, self._device) for key, x in named.items()}
            results = value(*there, **named)
            for place in WRITTEN.get(name, ()):
                if place < len(operands):
                    _write_back(operands[place], there[place])
            self._keep(name, value, there, named, results)
            return _back(results)

        return call

    def _keep(self, name: str, function: Callable, operands: list, named: dict, results: object) -> None:
        """Remember a call that gives numbers and records no graph, if none of its shapes is remembered."""
        if any(place < len(operands) for place in WRITTEN.get(name, ())):
            return
        tensors = [x for x in (*operands, *named.values()) if isinstance(x, Tensor)]
        found = results if isinstance(results, tuple) else (results,)
        if not all(isinstance(x, Tensor) and x.numel() and not x.requires_grad for x in found):
            return
        owned = {x.untyped_storage().data_ptr() for x in tensors}
        if any(x.untyped_storage().data_ptr() in owned for x in found):  # a view of an operand: nothing was computed
            return
        kept, key = self._calls.setdefault(name, {}), tuple((x.dtype, x.shape) for x in tensors)
        if tensors and key not in kept and len(kept) < KEPT:
            kept[key] = (function, operands, named, tuple(x.clone() for x in found))

    @torch.no_grad()
    def prove_replays(self, proof: Proof) -> None:
        """Each kept call in a graph, over results full of NaN, replayed twice."""
        for name, kept in self._calls.items():
            for function, operands, named, expected in kept.values():
                replayed = _replayed(lambda f=function, x=operands, n=named: f(*x, **n))
                proof.equal("replayed in a graph", expected, replayed, at=name)


def _replayed(function: Callable[[], object]) -> tuple[Tensor, ...]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    results = results if isinstance(results, tuple) else (results,)
    for result in results:
        result.fill_(float("nan") if result.is_floating_point() else -1)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return tuple(x.clone() for x in results)
