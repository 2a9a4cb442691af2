"""The problems `a+b=`: all of them, split by a hash into training and held-out ones, as rows of SkyRL's data format.

What must stay equal: a problem's split depends on its text only, so that no seed or order ever moves a held-out problem
into training.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skyrl_isoexec.launch.config import TaskConfig
from skyrl_isoexec.launch.task.env import ENV_ID
from skyrl_isoexec.launch.task.tokenizer import EOS


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One addition."""

    prompt: str
    """What the model reads, such as `12+34=`."""
    answer: str
    """What it should write before its end-of-sequence symbol, such as `46`."""


def problems(digits: int) -> Iterator[Problem]:
    """All ordered additions of two numbers of at most `digits` digits, without leading zeros."""
    for a in range(10**digits):
        for b in range(10**digits):
            yield Problem(prompt=f"{a}+{b}=", answer=str(a + b))


def is_held_out(problem: Problem, one_in: int) -> bool:
    """Whether a problem belongs to the held-out part, about one in `one_in` of all problems."""
    return _hash(problem) % one_in == 0


def _hash(problem: Problem) -> int:
    return int.from_bytes(hashlib.sha256(problem.prompt.encode()).digest()[:8], "big")


def context(shots: int, train: list[Problem]) -> str:
    """`shots` solved problems of the training part, as a model writes them; the same ones for every problem."""
    chosen = sorted(train, key=_hash)[:shots]
    return "".join(f"{problem.prompt}{problem.answer}{EOS}" for problem in chosen)


def split(digits: int, one_in: int) -> tuple[list[Problem], list[Problem]]:
    """(training problems, held-out problems). Raises ValueError if one of them is empty."""
    train: list[Problem] = []
    held_out: list[Problem] = []
    for problem in problems(digits):
        (held_out if is_held_out(problem, one_in) else train).append(problem)
    if not train or not held_out:
        raise ValueError(f"additions of {digits} digits with one in {one_in} held out leave one part empty")
    return train, held_out


def row(problem: Problem, before: str = "") -> dict:
    """A problem, after a `context`, as a row of SkyRL's data format: messages, environment, what its reward needs."""
    return {
        "data_source": "addition",
        "prompt": [{"role": "user", "content": before + problem.prompt}],
        "env_class": ENV_ID,
        "reward_spec": {"method": "rule", "ground_truth": problem.answer},
    }


def write_jsonl(path: Path, rows: list[Problem], before: str = "") -> None:
    """Write problems, each after a `context`, to `path` at once: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row(problem, before)) + "\n" for problem in rows)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_data(train_path: Path, held_out_path: Path, task: TaskConfig) -> None:
    """Write the training part and the held-out part to their paths."""
    train, held_out = split(task.digits, task.held_out_one_in)
    before = context(task.shots, train)
    write_jsonl(train_path, train, before)
    write_jsonl(held_out_path, held_out, before)
