"""Notice that a process of the run has died, end the run with the cause, and leave no process behind."""

from __future__ import annotations

import _thread
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

POLL_SECONDS = 2.0
TRIES = 3
GRACE_SECONDS = 5.0


class EngineDied(RuntimeError):
    """An inference server stopped answering its health check."""


class Watch:
    """Polls the health of inference servers; when one fails three times in a row, interrupts the main thread."""

    def __init__(self, urls: list[str]) -> None:
        self._urls, self._stop = urls, threading.Event()
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="isoexec-watch", daemon=True)

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def stop(self) -> None:
        """End polling; a failure seen before stays readable."""
        self._stop.set()

    def _run(self) -> None:
        failures = dict.fromkeys(self._urls, 0)
        while not self._stop.wait(POLL_SECONDS):
            for url in self._urls:
                reason = _health(url)
                failures[url] = failures[url] + 1 if reason else 0
                if failures[url] >= TRIES and not self._stop.is_set():
                    self.failure = f"inference server {url} does not answer its health check ({reason})"
                    _thread.interrupt_main()
                    return


def _health(url: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=20) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except (urllib.error.URLError, OSError) as error:
        return str(error)


@contextmanager
def no_orphans() -> Iterator[None]:
    """On exit, end every process that was started inside and is still alive, first gently, then not."""
    me = psutil.Process()
    before = {p.pid for p in me.children(recursive=True)}
    seen: dict[int, psutil.Process] = {}
    stop = threading.Event()

    def collect() -> None:
        while True:
            try:
                seen.update({p.pid: p for p in me.children(recursive=True) if p.pid not in before})
            except psutil.Error:
                pass
            if stop.wait(1.0):
                return

    collector = threading.Thread(target=collect, name="isoexec-processes", daemon=True)
    collector.start()
    try:
        yield
    finally:
        stop.set()
        collector.join(timeout=2.0)
        deadline = time.monotonic() + GRACE_SECONDS
        alive = [p for p in seen.values() if _alive(p)]
        while alive and time.monotonic() < deadline:
            time.sleep(0.1)
            alive = [p for p in alive if _alive(p)]
        for process in alive:
            _signal(process.terminate)
        _, alive = psutil.wait_procs(alive, timeout=GRACE_SECONDS)
        for process in alive:
            _signal(process.kill)


def _alive(process: psutil.Process) -> bool:
    try:
        if "multiprocessing.resource_tracker" in " ".join(process.cmdline()):
            return False  # it ends with the process that it tracks, and must outlive it
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(send: object) -> None:
    try:
        send()
    except psutil.Error:
        pass
