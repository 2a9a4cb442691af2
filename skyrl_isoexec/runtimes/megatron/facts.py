"""What a trainer process really is: read back from the objects that compute, never from the settings that asked."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import torch
from megatron.core import parallel_state

from .adapter import MegatronDecoder
from .weights import unwrap

VERSIONS = ("torch", "numba", "numpy", "megatron-core", "transformers")


def facts(module: torch.nn.Module) -> dict[str, Any]:
    """Plain data: model class, kernels bound, schedule, parallel degrees, dtype, versions, process."""
    model = unwrap(module)
    unified = isinstance(model, MegatronDecoder)
    kernels = model.stage.kernels if unified else None
    bound = {name: _qualified(f) for name, f in vars(kernels).items() if callable(f)} if unified else {}
    return {
        "runtime": "megatron",
        "pid": os.getpid(),
        "model": type(model).__qualname__,
        "kernels": bound,
        "schedule": model.stage.schedule.to_dict() if unified else None,
        "dtype": str(next(model.parameters()).dtype),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
    }


def _qualified(function: object) -> str:
    function = getattr(function, "func", function)  # a partial binds the schedule
    return f"{function.__module__}.{function.__qualname__}"
