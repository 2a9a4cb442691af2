"""Names that an upstream accepts in the dicts that SkyRL passes on to it unread.

They are read from the upstream's source, as installed, without importing it: a misspelled engine argument is then
refused before a process starts, not minutes later in a worker.
"""

import ast
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Source:
    """Classes of an installed package whose annotated fields are the accepted names."""

    package: str
    """Top-level package."""
    file: str
    """File relative to the package's folder."""
    classes: tuple[str, ...]


ENGINE = (
    Source(package="vllm", file="engine/arg_utils.py", classes=("EngineArgs", "AsyncEngineArgs")),
    Source(package="vllm", file="entrypoints/openai/cli_args.py", classes=("BaseFrontendArgs", "FrontendArgs")),
)
SAMPLING = (Source(package="vllm", file="sampling_params.py", classes=("SamplingParams",)),)
ROUTER = (Source(package="vllm_router", file="router_args.py", classes=("RouterArgs",)),)
OPTIMIZER = (Source(package="megatron", file="core/optimizer/optimizer_config.py", classes=("OptimizerConfig",)),)
TRANSFORMER = (
    Source(package="megatron", file="core/model_parallel_config.py", classes=("ModelParallelConfig",)),
    Source(
        package="megatron",
        file="core/transformer/transformer_config.py",
        classes=("TransformerConfig", "MLATransformerConfig"),
    ),
)

OPEN: dict[str, tuple[Source, ...]] = {
    "generator.inference_engine.engine_init_kwargs": ENGINE,
    "generator.inference_engine.router_init_kwargs": ROUTER,
    "generator.sampling_params.additional_kwargs": SAMPLING,
    "generator.eval_sampling_params.additional_kwargs": SAMPLING,
    "trainer.policy.megatron_config.optimizer_config_kwargs": OPTIMIZER,
    "trainer.policy.megatron_config.transformer_config_kwargs": TRANSFORMER,
    "trainer.ref.megatron_config.optimizer_config_kwargs": OPTIMIZER,
    "trainer.ref.megatron_config.transformer_config_kwargs": TRANSFORMER,
}
"""Dicts of SkyRL's configuration and what their names have to be. Other dicts of SkyRL's take any name."""


def host_keys(key: str) -> frozenset[str] | None:
    """The names valid directly under `key`, or None where any name is. RuntimeError if the upstream is missing."""
    return _names(OPEN[key]) if key in OPEN else None


@functools.cache
def _names(sources: tuple[Source, ...]) -> frozenset[str]:
    return frozenset(name for source in sources for name in _fields(source))


def _fields(source: Source) -> list[str]:
    spec = importlib.util.find_spec(source.package)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    paths = [path for folder in folders if (path := Path(folder) / source.file).is_file()]
    if not paths:
        raise RuntimeError(f"{source.package} is not installed, so its arguments cannot be checked: run make setup")
    body = ast.parse(paths[0].read_text(encoding="utf-8")).body
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name in source.classes]
    return [
        statement.target.id
        for node in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not statement.target.id.startswith("_")
    ]
