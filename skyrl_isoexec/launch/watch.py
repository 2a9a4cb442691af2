"""Notice that a process of the run has died, end the run with the cause, and leave no process behind."""

from __future__ import annotations

import _thread
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil

POLL_SECONDS = 2.0
TRIES = 3
GRACE_SECONDS = 5.0


class ProcessDied(RuntimeError):
    """A process that the run cannot go on without is gone, or an inference server stopped answering."""


class Watch:
    """Polls inference servers and processes; when one is gone, interrupts the main thread.

    A server is gone when its health check fails three times in a row: one that is busy may miss one.
    """

    def __init__(self, urls: list[str]) -> None:
        self._urls, self._stop = urls, threading.Event()
        self._processes: dict[str, psutil.Process] = {}
        self.found: str | None = None
        """What is gone, once something is."""
        self._thread = threading.Thread(target=self._run, name="isoexec-watch", daemon=True)

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def stop(self) -> None:
        """End polling; what was found before stays readable."""
        self._stop.set()

    def add(self, pids: Mapping[str, int]) -> None:
        """Watch processes of this machine too: {what it is: id}. psutil.NoSuchProcess if one is gone already."""
        self._processes = {**self._processes, **{name: psutil.Process(pid) for name, pid in pids.items()}}

    def look(self) -> str | None:
        """Look now, once; `found`."""
        self.found = self.found or self._dead_process() or self._dead_server()
        return self.found

    def _dead_process(self) -> str | None:
        for name, process in self._processes.items():
            if not _alive(process):
                return f"{name} (process {process.pid}) died"
        return None

    def _dead_server(self) -> str | None:
        for url in self._urls:
            reason = _health(url)
            if reason:
                return f"the inference server at {url} does not answer its health check ({reason}): its engine died"
        return None

    def _run(self) -> None:
        failures = 0
        while not self._stop.wait(POLL_SECONDS):
            found = self._dead_process()
            if found is None:
                reason = self._dead_server()
                failures = failures + 1 if reason else 0
                found = reason if failures >= TRIES else None
            if found is not None and not self._stop.is_set():
                self.found = found
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
