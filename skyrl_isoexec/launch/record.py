"""What a run leaves behind and shows: `metrics.jsonl` in the run folder, and one line a step on the terminal."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from loguru import logger
from tqdm import tqdm

REWARD = "reward/avg_raw_reward"
DIFF_MEAN = "policy/rollout_train_logprobs_abs_diff_mean"
DIFF_MAX = "policy/rollout_train_logprobs_abs_diff_max"
PHASES = (
    ("generate", "timing/generate"),
    ("score", "timing/fwd_logprobs_values_reward"),
    ("train", "timing/train_critic_and_policy"),
    ("sync", "timing/sync_weights"),
    ("step", "timing/step"),
)
HEADER = (
    f"{'step':>5} {'reward':>7} {'mean |diff|':>12} {'max |diff|':>12} {'mismatched':>10} {'compared':>9}  "
    + " ".join(f"{name:>9}" for name, _ in PHASES)
)


def log_to(folder: Path) -> None:
    """Send this process's log to `logs/launcher.log`, and nothing of it to the terminal."""
    logger.remove()
    logger.add(folder / "logs" / "launcher.log", level="INFO")


def plain(value: Any) -> Any:
    """A number or text that JSON can hold, from a metric."""
    if hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def step_line(step: int, metrics: dict[str, Any], total: int | None) -> str:
    """One row under HEADER; a value the step does not have is shown as '-'."""

    def show(name: str, form: str) -> str:
        return format(metrics[name], form) if name in metrics else "-"

    label = f"{step}/{total}" if total else str(step)
    seconds = " ".join(f"{show(key, '.2f') + ' s':>9}" for _, key in PHASES)
    counts = f"{show('isoexec/mismatched_tokens', 'd'):>10} {show('isoexec/compared_tokens', 'd'):>9}"
    diffs = f"{show(DIFF_MEAN, '.3e'):>12} {show(DIFF_MAX, '.3e'):>12}"
    return f"{label:>5} {show(REWARD, '.3f'):>7} {diffs} {counts}  {seconds}"


def summary(folder: Path) -> str:
    """One line on all steps that `metrics.jsonl` has; empty where there are none."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    steps = {row["step"]: row for row in rows if "isoexec/compared_tokens" in row}
    mismatched, compared = (
        sum(row[f"isoexec/{name}_tokens"] for row in steps.values()) for name in ("mismatched", "compared")
    )
    return f"{mismatched} of {compared} tokens differ in {len(steps)} steps; {path}" if steps else ""


def _show(line: str) -> None:
    """Print a line where the host may be drawing a progress bar."""
    tqdm.write(line)
    sys.stdout.flush()


class Record:
    """SkyRL's tracker with a copy of every step in `metrics.jsonl`.

    The file is opened for appending, so that a resumed run goes on in it.
    """

    def __init__(self, tracker: Any, folder: Path, total_steps: int | None) -> None:
        self._tracker, self._total, self._shown = tracker, total_steps, False
        self._path = folder / "metrics.jsonl"

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """Write, show and pass on one step's metrics."""
        row = {key: plain(value) for key, value in data.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **row}, sort_keys=True) + "\n")
        if "isoexec/compared_tokens" in row:
            if not self._shown:
                _show(HEADER)
                self._shown = True
            _show(step_line(step, row, self._total))
        numbers = {key: value for key, value in data.items() if not isinstance(value, str)}  # all that trackers take
        self._tracker.log(numbers, step=step, commit=commit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)
