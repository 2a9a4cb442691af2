"""Every check in its order: what needs nothing first, then data, then the checkpoint, and the run's folder last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...contract import Contract
from .. import folder
from ..assemble import assemble
from ..composition import compose_contract
from ..config import LaunchConfig
from ..task import prepare_checkpoint, prepare_data
from . import data, distribution, machine, model, ranges


def check(launch: LaunchConfig, cfg: Any) -> Contract | None:
    """The run's contract (the native arm has none), once nothing is left to refuse; only then its folder is made.

    Completes SkyRL's configuration in place. ValueError for what cannot work.
    """
    machine.device(launch.runtime.device)
    machine.cores(launch.runtime.threads)
    machine.memory(launch)
    machine.ports(cfg)
    if launch.exec.name == "isoexec":
        machine.variables()
        machine.patches()
    ranges.numbers(cfg)
    ranges.names(cfg)
    ranges.updates(cfg)
    ranges.resume(cfg)
    ranges.packing(cfg, launch.exec.name)
    distribution.sampling(cfg)
    if launch.exec.name == "isoexec" and launch.runtime.device == "cuda":
        distribution.division(cfg.generator.sampling_params.temperature)
    model.pages(launch)
    model.scheduling(cfg, launch.runtime.device)
    planned = model.planned(launch) if launch.model.path is None else None
    if planned is not None:
        model.layouts(planned, launch)
    ranges.replicas(cfg, launch.topology.trainer.dp or 1)
    ranges.hosts(cfg)
    kept = None if cfg.trainer.resume_mode == "none" else Path(cfg.trainer.ckpt_path)
    folder.vacant(launch.run_dir, checkpoints=kept)
    sources = data.sources(launch, cfg)
    for source in sources:
        data.environments(source, cfg)
    if planned is not None:  # before time is spent on training it
        _fits(launch, cfg, planned)
        if launch.exec.name == "isoexec":
            compose_contract(launch, cfg, planned)
    checkpoint = prepare_checkpoint(launch)
    config = model.checkpoint(checkpoint, dtype=launch.model.dtype)
    _fits(launch, cfg, config)
    tokenizer = model.tokenizer(checkpoint, config, use_fast=not cfg.trainer.disable_fast_tokenizer)
    for source in sources:
        data.prompts(source, tokenizer, cfg)
    _reference(launch, cfg)
    contract = compose_contract(launch, cfg, config) if launch.exec.name == "isoexec" else None
    assemble(launch, cfg, checkpoint, config, contract)
    folder.claim(launch.run_dir)
    prepare_data(launch, cfg)
    return contract


def _fits(launch: LaunchConfig, cfg: Any, config: Any) -> None:
    model.lengths(cfg, config)
    model.layouts(config, launch)
    model.router(config, launch, cfg)
    model.transport(config, launch)
    model.states(config, launch)
    model.widths(config, launch)
    model.runner(config, launch)
    model.cache(cfg, config, launch)


def _reference(launch: LaunchConfig, cfg: Any) -> None:
    """A reference model of its own is read as strictly as the policy."""
    path, algorithm = cfg.trainer.ref.model.path, cfg.trainer.algorithm
    if path in (None, cfg.trainer.policy.model.path) or not (algorithm.use_kl_loss or algorithm.use_kl_in_reward):
        return
    model.layouts(model.checkpoint(Path(path), dtype=launch.model.dtype, key="trainer.ref.model.path"), launch)
