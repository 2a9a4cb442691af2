"""Launching the product's own command, as a user does, and reading what it leaves behind."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

MARK = "PYTEST_LOOP_RUN"
"""A variable that every process of a launched run inherits, so that those left over can be found."""
STARTED_SECONDS = 420
"""A run's first step has to be there after so long, on two busy cores."""


def marked(mark: str) -> list[psutil.Process]:
    """The living processes of a run, found by the environment that they inherited."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@dataclass(kw_only=True)
class Run:
    """One launched run."""

    folder: Path
    process: subprocess.Popen
    mark: str

    @property
    def output(self) -> str:
        """What the terminal would have shown."""
        return self.folder.with_suffix(".terminal").read_text(encoding="utf-8", errors="replace")

    @property
    def errors(self) -> str:
        """What went to standard error."""
        return self.folder.with_suffix(".errors").read_text(encoding="utf-8", errors="replace")

    @property
    def steps(self) -> dict[int, dict]:
        """{step: its metrics}; of a step that was repeated after a resume, the later ones."""
        path = self.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return {row["step"]: row for row in rows if "isoexec/compared_tokens" in row}

    def wait(self, timeout: float) -> int:
        """The exit status."""
        return self.process.wait(timeout)

    def until(self, seen: Callable[[], bool], timeout: float = STARTED_SECONDS) -> None:
        """Wait until something is seen; fails if the run ends before."""
        deadline = time.monotonic() + timeout
        while not seen():
            assert self.process.poll() is None, f"the run ended early: {self.tail()}"
            assert time.monotonic() < deadline, f"not seen in {timeout} s: {self.tail()}"
            time.sleep(0.05)

    def named(self, *words: str) -> list[psutil.Process]:
        """Processes of this run with one of the words in their title."""
        found = []
        for process in marked(self.mark):
            try:
                title = " ".join([process.name(), *process.cmdline()])
            except psutil.Error:
                continue
            if any(word in title for word in words):
                found.append(process)
        return found

    def left_over(self, grace: float = 5.0) -> list[str]:
        """Titles of processes that are still there after a grace time."""
        deadline = time.monotonic() + grace
        while (alive := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        titles = []
        for process in alive:
            try:
                titles.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
            except psutil.Error:
                continue
        return titles

    def tail(self) -> str:
        """The end of everything that was written, for a failed assertion."""
        parts = [self.output[-1500:], self.errors[-1500:]]
        for log in ("launcher.log", "workers.log"):
            path = self.folder / "logs" / log
            if path.exists():
                parts.append(f"--- {log}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(parts)


@contextmanager
def started(
    folder: Path, *arguments: str, module: str = "skyrl.train", before: tuple[str, ...] = (), path: str | None = None
) -> Iterator[Run]:
    """A run in the background, in a folder of its own; whatever is left of it at the end is killed.

    `module` is another that takes the same arguments after those of `before`, found on `path`.
    """
    mark, cwd = uuid.uuid4().hex, folder.parent
    command = [sys.executable, "-m", module, *before, *arguments, f"run_dir={folder}"]
    variables = {**os.environ, MARK: mark, **({} if path is None else {"PYTHONPATH": path})}
    with (
        folder.with_suffix(".terminal").open("w") as terminal,
        folder.with_suffix(".errors").open("w") as errors,
    ):
        process = subprocess.Popen(command, cwd=cwd, env=variables, stdout=terminal, stderr=errors)
        try:
            yield Run(folder=folder, process=process, mark=mark)
        finally:
            for left in marked(mark):
                try:
                    left.kill()
                except psutil.Error:
                    continue
            process.wait()


@pytest.fixture(scope="session")
def start() -> Callable[..., object]:
    """`with start(folder, *arguments) as run:`"""
    return started


@pytest.fixture
def complete() -> Callable[..., Run]:
    """`run = complete(folder, *arguments)`: launched, ended with 0, nothing left over."""

    def launch(folder: Path, *arguments: str, timeout: float = 540) -> Run:
        with started(folder, *arguments) as run:
            status = run.wait(timeout)
            assert status == 0, run.tail()
            assert not run.left_over()
        return run

    return launch
