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

from skyrl_isoexec.launch.task.env import ENV_ID


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
    digest = hashlib.sha256(problem.prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def split(digits: int, one_in: int) -> tuple[list[Problem], list[Problem]]:
    """(training problems, held-out problems). Raises ValueError if one of them is empty."""
    train: list[Problem] = []
    held_out: list[Problem] = []
    for problem in problems(digits):
        (held_out if is_held_out(problem, one_in) else train).append(problem)
    if not train or not held_out:
        raise ValueError(f"additions of {digits} digits with one in {one_in} held out leave one part empty")
    return train, held_out


def row(problem: Problem) -> dict:
    """A problem as a row of SkyRL's data format: messages, environment and what its reward is computed from."""
    return {
        "data_source": "addition",
        "prompt": [{"role": "user", "content": problem.prompt}],
        "env_class": ENV_ID,
        "reward_spec": {"method": "rule", "ground_truth": problem.answer},
    }


def write_jsonl(path: Path, rows: list[Problem]) -> None:
    """Write problems to `path` at once: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row(problem)) + "\n" for problem in rows)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_data(train_path: Path, held_out_path: Path, digits: int, one_in: int) -> None:
    """Write the training part and the held-out part to their paths."""
    train, held_out = split(digits, one_in)
    write_jsonl(train_path, train)
    write_jsonl(held_out_path, held_out)
