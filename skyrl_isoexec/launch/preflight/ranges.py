"""Numbers and names of SkyRL's configuration that its own validation lets through, and the validation itself."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import skyrl_gym
from loguru import logger
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.tracking import Tracking
from skyrl.train.utils.trainer_utils import GLOBAL_STEP_PREFIX, ResumeMode

from .. import folder
from ..task import arithmetic, env
from .refusal import Refusal

ENGINE = "generator.inference_engine"
PARAMS, EVAL = "generator.sampling_params", "generator.eval_sampling_params"
STATE = "trainer_state.pt"
OPTIMIZER, ALGORITHM = "trainer.policy.optimizer_config", "trainer.algorithm"

COUNTS = (
    "trainer.epochs",
    "trainer.max_training_steps",
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.micro_train_batch_size_per_gpu",
    "trainer.micro_forward_batch_size_per_gpu",
    "trainer.update_epochs_per_batch",
    "trainer.eval_batch_size",
    "trainer.max_prompt_length",
    "generator.n_samples_per_prompt",
    "generator.eval_n_samples_per_prompt",
    "generator.max_turns",
    f"{PARAMS}.max_generate_length",
    f"{EVAL}.max_generate_length",
    f"{ENGINE}.max_num_seqs",
    f"{ENGINE}.max_num_batched_tokens",
)
"""1 or more; null where the type allows it."""
SWITCHES = (
    "trainer.eval_interval",
    "trainer.ckpt_interval",
    "trainer.hf_save_interval",
    "trainer.max_ckpts_to_keep",
    "trainer.max_tokens_per_microbatch",
    f"{ALGORITHM}.dynamic_sampling.max_sample_batches",
)
"""1 or more, or -1 for off."""
RANGES: dict[str, tuple[float, float]] = {
    "trainer.seed": (0, 2**31 - 1),
    "environment.skyrl_gym.max_env_workers": (0, 1024),
    "data.dataloader.num_workers": (0, 1024),
    f"{PARAMS}.temperature": (0.01, 100),
    f"{OPTIMIZER}.lr": (0, 1),
    f"{OPTIMIZER}.weight_decay": (0, 1),
    f"{OPTIMIZER}.max_grad_norm": (0, 1e9),
    f"{OPTIMIZER}.num_warmup_steps": (0, 2**31 - 1),
    f"{ALGORITHM}.eps_clip_low": (0, 1),
    f"{ALGORITHM}.eps_clip_high": (0, 1e9),
    f"{ALGORITHM}.kl_loss_coef": (0, 1e9),
    f"{ALGORITHM}.dynamic_sampling.min_replace_ratio": (0, 1),
    f"{EVAL}.temperature": (0, 1e9),
    f"{EVAL}.top_p": (1e-9, 1),
    f"{EVAL}.min_p": (0, 1),
    f"{EVAL}.top_k": (-1, 2**31 - 1),
    f"{ENGINE}.gpu_memory_utilization": (1e-9, 1),
}
"""Lowest and highest value; below a temperature of 0.01, vLLM samples at 0.01 without a word."""
CHOICES: dict[str, tuple[str | None, ...]] = {
    "trainer.logger": tuple(Tracking.supported_backends),
    "trainer.resume_mode": tuple(mode.value for mode in ResumeMode),
    f"{ALGORITHM}.dynamic_sampling.type": (None, "filter", "replace"),
    f"{ALGORITHM}.kl_estimator_type": ("k1", "k2", "k3", "abs"),
    f"{ALGORITHM}.kl_ctrl.type": ("fixed", "adaptive"),
    "generator.chat_template.source": ("name", "file"),
}
"""Every name that the key may have."""


def value_of(cfg: Any, key: str) -> Any:
    """The value at a dotted key of SkyRL's configuration."""
    return functools.reduce(getattr, key.split("."), cfg)


def numbers(cfg: Any) -> None:
    """Refuse a number that no run can have."""
    for key in COUNTS:
        value = value_of(cfg, key)
        if value is not None and value < 1:
            raise Refusal(f"{key}={value} is not positive; set it to 1 or more")
    for key in SWITCHES:
        value = value_of(cfg, key)
        if value < 1 and value != -1:
            raise Refusal(f"{key}={value} means nothing; set it to 1 or more, or to -1 for off")
    for key, (low, high) in RANGES.items():
        value = value_of(cfg, key)
        if not low <= value <= high:
            raise Refusal(f"{key}={value} is not between {low} and {high}; set it to a value that is")
    betas = value_of(cfg, f"{OPTIMIZER}.adam_betas")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise Refusal(f"{OPTIMIZER}.adam_betas={list(betas)} are not two numbers in [0, 1); set [0.9, 0.95]")


def names(cfg: Any) -> None:
    """Refuse a name of an algorithm, an environment or a tracker that nothing answers to."""
    for key, known in CHOICES.items():
        value = value_of(cfg, key)
        if value not in known:
            raise Refusal(f"{key}={value} is unknown; choose one of {', '.join(map(_shown, known))}")
    tracker = cfg.trainer.logger
    if tracker != "console" and importlib.util.find_spec(tracker) is None:
        raise Refusal(f"trainer.logger={tracker}, but the package {tracker} is not installed; set it to console")
    environment(cfg.environment.env_class, "environment.env_class")
    template = cfg.generator.chat_template.name_or_path
    if template is not None:
        raise Refusal(
            f"generator.chat_template.name_or_path={template}: with a template of its own SkyRL makes the tokens of a "
            "conversation again from its text, and a trainer has to see those that were sampled; set it to null, and "
            "put the template into the checkpoint's tokenizer"
        )


def environment(name: Any, where: str) -> None:
    """Refuse an environment that SkyRL-Gym does not make."""
    known = sorted({env.ENV_ID, arithmetic.ENV_ID, *skyrl_gym.registry})
    if name not in known:
        raise Refusal(f"{where}={_shown(name)} is unknown; choose one of {', '.join(known)}")


def updates(cfg: Any) -> None:
    """Refuse batches that cannot be cut."""
    batch, mini = cfg.trainer.train_batch_size, cfg.trainer.policy_mini_batch_size
    if mini > batch:
        raise Refusal(f"trainer.policy_mini_batch_size={mini} is more than trainer.train_batch_size={batch}; lower it")


def replicas(cfg: Any, dp: int) -> None:
    """Refuse data-parallel replicas among which a mini-batch's samples are not divided."""
    samples = cfg.trainer.policy_mini_batch_size * cfg.generator.n_samples_per_prompt
    if samples % dp:
        raise Refusal(
            f"topology.trainer.dp={dp} does not divide the {samples} samples of a mini-batch "
            "(trainer.policy_mini_batch_size times generator.n_samples_per_prompt); choose one that does, "
            "or change them"
        )


def warmup(cfg: Any, prompts: int) -> None:
    """Refuse a warm-up longer than the run over so many prompts, against which Megatron asserts mutely."""
    batch, steps = cfg.trainer.train_batch_size, cfg.trainer.max_training_steps
    steps = min(prompts // batch * cfg.trainer.epochs, steps or prompts * cfg.trainer.epochs)
    total = steps * (batch // cfg.trainer.policy_mini_batch_size) * cfg.trainer.update_epochs_per_batch
    asked = cfg.trainer.policy.optimizer_config.num_warmup_steps
    if asked >= total:
        raise Refusal(
            f"{OPTIMIZER}.num_warmup_steps={asked} is not below the run's {total} optimizer steps "
            "(trainer.max_training_steps or epochs, train_batch_size / policy_mini_batch_size); set "
            f"{OPTIMIZER}.num_warmup_steps={total // 4}, {total - 1} at most, or choose run=short, "
            "which warms up in 2 of 6"
        )


def resume(cfg: Any) -> None:
    """Refuse to resume from a checkpoint that is not there, and to save where no folder can be made."""
    for key, interval in (("ckpt_path", "ckpt_interval"), ("export_path", "hf_save_interval")):
        place = getattr(cfg.trainer, key)
        if getattr(cfg.trainer, interval) > 0 and "://" not in place and not folder.can_be_made(Path(place)):
            raise Refusal(f"trainer.{key}={place} is not a folder and cannot be made; name another one")
    path = cfg.trainer.resume_path
    if cfg.trainer.resume_mode != ResumeMode.FROM_PATH.value:
        return
    if path is None or not Path(path).is_dir():
        raise Refusal(f"trainer.resume_path={path} is not a folder; name the checkpoint's, or set resume_mode=latest")
    named = re.fullmatch(rf"{GLOBAL_STEP_PREFIX}\d+", Path(path).name)
    if named is None or not (Path(path) / STATE).is_file():
        raise Refusal(
            f"trainer.resume_path={path} is no checkpoint: it is not named {GLOBAL_STEP_PREFIX}NUMBER, or has no "
            f"{STATE}; name such a folder of an earlier run's checkpoints"
        )


def packing(cfg: Any, arm: str) -> None:
    """Refuse packed micro-batches in the arm whose model takes none."""
    if cfg.trainer.remove_microbatch_padding and arm == "native":
        raise Refusal(
            "trainer.remove_microbatch_padding=true with exec=native: that trainer packs none; set it to false"
        )


def hosts(cfg: Any) -> None:
    """Refuse what SkyRL's own validation refuses; it may also complete the configuration, in place."""
    logger.remove()  # its remarks would come between the user and the refusal; the run's log is set up later
    try:
        validate_cfg(cfg)
    except (AssertionError, ValueError, NotImplementedError, ZeroDivisionError) as error:
        said = " ".join(str(error).split())
        raise Refusal(
            f"SkyRL refuses the configuration: {said or 'it does not say why'}; change what it names"
        ) from error


def _shown(name: Any) -> str:
    return "null" if name is None else str(name)
