"""The rows that are trained and evaluated on: readable, in SkyRL's format, with prompts of the length allowed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.utils.logging

from ..config import LaunchConfig
from ..task import DATA, arithmetic, env, forms, is_embedded
from ..task.problems import split
from .ranges import environment, warmup
from .refusal import Refusal

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
TRAIN, EVALUATION = "data.train_data", "data.val_data"
OURS = (env.ENV_ID, arithmetic.ENV_ID)
"""Environments that compare with an answer in the row."""
FORMAT = "[{role: user, content: 1+1=}]"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file, or public data set, that a run reads."""

    key: str
    """The configuration's key that names it."""
    name: str
    rows: datasets.Dataset
    count: int
    """Rows in all; of the embedded task, `rows` is only the longest one."""


def sources(launch: LaunchConfig, cfg: Any) -> list[Source]:
    """Everything that the run reads, loaded as SkyRL loads it; of the embedded task, what the launcher will write."""
    evaluated = list(cfg.data.val_data or [])
    if cfg.trainer.eval_interval > 0 and not evaluated:
        raise Refusal(
            f"trainer.eval_interval={cfg.trainer.eval_interval} and {EVALUATION} names no data; "
            "give a list of files, or set trainer.eval_interval=-1"
        )
    if is_embedded(launch, cfg):
        train, held_out = split(launch.task.digits, launch.task.held_out_one_in)
        longest = datasets.Dataset.from_list(
            [forms(launch.task).row(max(train, key=lambda problem: len(problem.prompt)))]
        )
        found = [Source(key=TRAIN, name=cfg.data.train_data[0], rows=longest, count=len(train))]
        evaluated = [name for name in evaluated if Path(name).parent != launch.run_dir / DATA]
    elif not cfg.data.train_data:
        raise Refusal(f"{TRAIN}=[] names no data; give a list of files")
    else:
        found = _loaded(TRAIN, cfg.data.train_data)
    total = sum(source.count for source in found)
    if total < cfg.trainer.train_batch_size:
        raise Refusal(
            f"{TRAIN} has {total} prompts, fewer than trainer.train_batch_size = {cfg.trainer.train_batch_size}; "
            "lower it, or give more data"
        )
    warmup(cfg, total)
    return found + _loaded(EVALUATION, evaluated)


def _loaded(key: str, names: list[str]) -> list[Source]:
    found = []
    for name in names:
        rows = _read(key, name)
        if not len(rows):
            raise Refusal(f"{key}: {name} has no rows; give a file with some")
        found.append(Source(key=key, name=name, rows=rows, count=len(rows)))
    try:
        datasets.concatenate_datasets([source.rows for source in found]) if found else None
    except Exception as error:
        raise Refusal(f"{key}: the files have different columns ({_said(error)}); give them the same") from error
    return found


def _read(key: str, name: str) -> datasets.Dataset:
    kind, path = KINDS.get(os.path.splitext(name)[1].lower()), Path(name)
    if (kind or path.is_absolute()) and not os.path.exists(path):
        raise Refusal(f"{key} names {name}, which does not exist; give a file that does")
    if kind is None and os.path.isfile(path):
        raise Refusal(f"{key} names {name}, whose kind is unknown; give a file that ends in {', '.join(KINDS)}")
    if kind is not None and not os.path.isfile(path):
        raise Refusal(f"{key} names {name}, which is not a file; give one")
    if kind is not None and not os.path.getsize(path):
        raise Refusal(f"{key}: {name} is empty; give a file with rows")
    with _quiet():
        try:
            if kind is not None:
                return datasets.load_dataset(kind, data_files=name, keep_in_memory=True)["train"]
            public, _, part = name.partition(":")
            return datasets.load_dataset(path=public, keep_in_memory=True)[part or "train"]
        except Exception as error:
            mend = "mend the file" if kind else "give a file, or the name of a public data set"
            raise Refusal(f"{key}: {name} cannot be read ({_said(error)}); {mend}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log and the bars of the library that reads: the refusal says what went wrong."""
    before = datasets.utils.logging.get_verbosity(), huggingface_hub.utils.logging.get_verbosity()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    huggingface_hub.utils.logging.set_verbosity(logging.CRITICAL)
    shown = datasets.utils.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(before[0])
        huggingface_hub.utils.logging.set_verbosity(before[1])
        if shown:
            datasets.enable_progress_bars()


def _said(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__


def prompts(source: Source, tokenizer: Any, cfg: Any) -> None:
    """Refuse rows that are not in SkyRL's format and prompts that its filter would drop without a word."""
    where, limit, names = f"{source.key}: {source.name}", cfg.trainer.max_prompt_length, source.rows.column_names
    if "prompt" not in names:
        raise Refusal(f"{where} has columns {', '.join(names)} and no column prompt; give it one, with {FORMAT}")
    lengths = []
    for number, messages in enumerate(source.rows["prompt"], 1):
        if not messages or not isinstance(messages, list) or not all(_is_message(item) for item in messages):
            raise Refusal(f"{where}: the prompt of row {number} is {str(messages)[:60]!r}; it has to be like {FORMAT}")
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, tokenize=True)
        except Exception as error:
            raise Refusal(
                f"{where}: the tokenizer's chat template refuses the prompt of row {number} ({_said(error)}); mend the "
                "row, or give a checkpoint whose tokenizer has a chat template"
            ) from error
        lengths.append(len(ids))
    if dropped := sum(length > limit for length in lengths):
        which = f"{dropped} of {source.count} prompts" if len(lengths) == source.count else "prompts"
        raise Refusal(
            f"{which} in {source.name} are longer than trainer.max_prompt_length = {limit} "
            f"tokens, the longest has {max(lengths)}; raise it (and generator.max_input_length) or shorten them"
        )


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") is not None and item.get("content") is not None


def environments(source: Source, cfg: Any) -> None:
    """Refuse rows for an environment that does not exist, or without the answer that ours compares with."""
    names = source.rows.column_names
    kinds = source.rows["env_class"] if "env_class" in names else [None] * len(source.rows)
    specs = source.rows["reward_spec"] if "reward_spec" in names else [None] * len(source.rows)
    for number, (kind, spec) in enumerate(zip(kinds, specs, strict=True), 1):
        name = cfg.environment.env_class if kind is None else kind
        where = f"{source.key}: row {number} of {source.name}"
        environment(name, f"{where}: env_class")
        if name in OURS and (not isinstance(spec, dict) or spec.get("ground_truth") is None):
            raise Refusal(f"{where} has no reward_spec.ground_truth, which env_class={name} compares with; give it")
