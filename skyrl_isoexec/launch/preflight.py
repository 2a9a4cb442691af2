"""Refuse, before a process is started, what would fail minutes later in a worker: each with cause and mend."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoTokenizer

from ..kernels.attention.spec import kv_cache_shape
from ..model.checkpoint import INDEX, SINGLE, read_config
from ..model.config import DecoderConfig, check_partition
from ..model.families import from_hf, lookup
from ..model.weights import HEAD_NAME, layout
from .config import LaunchConfig


class Refusal(ValueError):
    """The run cannot start; the text says what, where and what to do."""


def checkpoint(folder: Path, *, dtype: str) -> DecoderConfig:
    """The decoder's configuration, after every tensor's presence and shape was read from the files' headers."""
    if not folder.is_dir():
        raise Refusal(
            f"trainer.policy.model.path={folder} is not a folder; "
            "give a Hugging Face checkpoint folder with config.json"
        )
    try:
        config = from_hf(read_config(folder), dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise Refusal(f"trainer.policy.model.path={folder}: {error}") from error
    found = _shapes(folder)
    expected, ignored = layout(config), lookup(config.family).ignored
    problems = []
    for name, shape in expected.items():
        if name not in found:
            problems.append(f"tensor {name} is missing (shape {shape} by config.json)")
        elif found[name] != shape:
            problems.append(f"tensor {name} has shape {found[name]}, config.json gives {shape}")
    for name in sorted(found.keys() - expected.keys()):
        if not any(re.fullmatch(rule, name) for rule in ignored) and not (config.tied_head and name == HEAD_NAME):
            problems.append(f"tensor {name} is not part of this model")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise Refusal(f"checkpoint {folder}: {shown}; mend the checkpoint, or give another one")
    return config


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    if (folder / SINGLE).exists():
        files = [SINGLE]
    elif (folder / INDEX).exists():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        raise Refusal(f"checkpoint {folder} has neither {SINGLE} nor {INDEX}; convert the weights to safetensors")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118
                    shapes[name] = tuple(handle.get_slice(name).get_shape())
        except Exception as error:
            raise Refusal(f"checkpoint file {folder / file} cannot be read: {error}; copy it again") from error
    return shapes


def vocabulary(folder: Path, config: DecoderConfig) -> None:
    """Refuse a tokenizer that can produce ids the model has no row for."""
    size = len(AutoTokenizer.from_pretrained(str(folder)))
    if size > config.vocab_size:
        raise Refusal(
            f"the tokenizer in {folder} has {size} tokens, the model's vocab_size is {config.vocab_size}; "
            "give the tokenizer that belongs to the checkpoint"
        )


def layouts(config: DecoderConfig, *, num_leaves: int, degrees: dict[str, int]) -> None:
    """Refuse a tensor-parallel degree of either side that does not divide the model."""
    for side, degree in degrees.items():
        try:
            check_partition(config, num_leaves=num_leaves, tp=degree)
        except ValueError as error:
            raise Refusal(f"{side}: {error}; choose a degree that divides it") from error


def lengths(cfg: Any, config: DecoderConfig) -> None:
    """Refuse lengths that do not fit the model's positions."""
    longest = cfg.trainer.max_prompt_length + cfg.generator.sampling_params.max_generate_length
    if longest > config.max_position:
        raise Refusal(
            f"trainer.max_prompt_length + generator.sampling_params.max_generate_length = {longest} is more than the "
            f"model's max_position_embeddings = {config.max_position}; lower one of them"
        )


def updates(cfg: Any) -> None:
    """Refuse a warm-up that is longer than the run, which Megatron's scheduler asserts against without a word."""
    for name in ("train_batch_size", "policy_mini_batch_size", "update_epochs_per_batch"):
        if getattr(cfg.trainer, name) <= 0:
            raise Refusal(f"trainer.{name}={getattr(cfg.trainer, name)} is not positive; set it to 1 or more")
    steps = cfg.trainer.max_training_steps
    if steps is not None and steps <= 0:
        raise Refusal(f"trainer.max_training_steps={steps} is not positive; set it to 1 or more")
    if steps is None:
        return
    per_step = cfg.trainer.train_batch_size // cfg.trainer.policy_mini_batch_size * cfg.trainer.update_epochs_per_batch
    warmup = cfg.trainer.policy.optimizer_config.num_warmup_steps
    if warmup >= steps * per_step:
        raise Refusal(
            f"trainer.policy.optimizer_config.num_warmup_steps={warmup} is not below the run's {steps * per_step} "
            "optimizer steps (trainer.max_training_steps, train_batch_size / policy_mini_batch_size); lower it"
        )


def resume(cfg: Any) -> None:
    """Refuse a way of resuming that SkyRL does not know, or a checkpoint that is not there."""
    from skyrl.train.utils.trainer_utils import ResumeMode

    mode, path = cfg.trainer.resume_mode, cfg.trainer.resume_path
    known = [member.value for member in ResumeMode]
    if mode not in known:
        raise Refusal(f"trainer.resume_mode={mode} is unknown; choose one of {', '.join(known)}")
    if mode == ResumeMode.FROM_PATH.value and (path is None or not Path(path).is_dir()):
        raise Refusal(f"trainer.resume_path={path} is not a folder; name the checkpoint's, or set resume_mode=latest")


def hosts(cfg: Any) -> None:
    """Refuse what SkyRL's own validation refuses; it may also complete the configuration, in place."""
    from loguru import logger
    from skyrl.train.utils import validate_cfg

    logger.remove()  # its remarks would come between the user and the refusal; the run's log is set up later
    try:
        validate_cfg(cfg)
    except (AssertionError, ValueError, NotImplementedError, ZeroDivisionError) as error:
        raise Refusal(f"SkyRL refuses the configuration: {error or 'it does not say why'}") from error


def pages(launch: LaunchConfig) -> None:
    """Refuse page and block sizes that the attention kernel does not take."""
    try:
        kv_cache_shape(1, launch.runtime.page_size, 1, 1, schedule=launch.schedule)
    except ValueError as error:
        raise Refusal(f"runtime.page_size, kernels.kv_block: {error}; choose a multiple") from error


def data(cfg: Any) -> None:
    """Refuse training data that is missing; what is not named like a file may be the name of a public data set."""
    if not cfg.data.train_data:
        raise Refusal("data.train_data=[] names no data; give a list of files")
    for name in cfg.data.train_data:
        is_file = Path(name).is_absolute() or Path(name).suffix in (".json", ".jsonl", ".parquet", ".csv")
        if is_file and not Path(name).exists():
            raise Refusal(f"data.train_data names {name}, which does not exist; give a file that does")


def device(name: str) -> None:
    """Refuse a device that this machine does not have."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise Refusal("runtime.device=cuda, but torch sees no CUDA device; set runtime.device=cpu")


def sampling(cfg: Any) -> None:
    """Refuse sampling settings under which rollout and trainer log-probabilities do not mean the same."""
    params = cfg.generator.sampling_params
    if params.logprobs is None:
        raise Refusal("generator.sampling_params.logprobs is null: rollouts carry nothing to compare; set it to 1")
    for name, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        value = getattr(params, name)
        if value != neutral and not (name == "top_k" and value == 0):
            raise Refusal(
                f"generator.sampling_params.{name}={value} changes the distribution that is sampled from, and "
                f"the trainer scores the whole one; set it to {neutral}"
            )
    if params.stop is not None:
        raise Refusal(
            f"generator.sampling_params.stop={list(params.stop)} makes SkyRL append an end token that was never "
            "sampled, with a made-up log-probability; set it to null and let the model end by its end token"
        )
    if params.temperature <= 0:
        raise Refusal(f"generator.sampling_params.temperature={params.temperature} must be above 0 for training")
    trained = cfg.trainer.algorithm.temperature
    if trained is not None and trained != params.temperature:
        raise Refusal(
            f"trainer.algorithm.temperature={trained} differs from generator.sampling_params.temperature="
            f"{params.temperature}; they must be equal"
        )


def port(number: int | None, key: str) -> None:
    """Refuse a port that somebody else listens on."""
    if number is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", number))
        except OSError as error:
            raise Refusal(f"{key}={number}: the port is in use ({error.strerror}); choose a free one") from error
