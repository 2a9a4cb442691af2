"""Which weights a worker may compute with, and for which requests: an epoch is committed, or nothing is computed.

An epoch is the number of optimizer updates behind the weights of one sync. Needs no vLLM: a step is what vLLM's
scheduler sends to a worker, of which only names are read. Whatever is refused leaves the worker without a committed
epoch, because the rest of that step was not computed either while the scheduler counts it as done.

A request whose log-probabilities a trainer will score must sample from the contract's distribution: see `sampling`.

What must stay equal: a cached page is read only under the very commit under which it was written. Two commits are not
one, even of the same epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from skyrl_isoexec.runtimes.vllm.sampling import SCORED, changes, scored

MARK = "isoexec refused:"
"""Every refusal starts with it, to be found in a log."""
EPOCH = "isoexec_epoch"
"""Key of the epoch in a request's `sampling_params.extra_args`."""
SYNC = "sync the weights"


class GuardError(RuntimeError):
    """One line: the field, what it is, what it must be, and the mend."""

    def __init__(self, what: str, mend: str) -> None:
        super().__init__(f"{MARK} {what}; {mend}")


class Guard:
    """The state of one worker process."""

    def __init__(self, temperature: str | None = None) -> None:
        self.temperature = temperature
        """Of the contract, as bits; None, without one, leaves sampling parameters alone."""
        self.epoch: int | None = None
        """What is committed; None refuses every request."""
        self.reason = "no weight sync was committed since the engine started"
        """Why `epoch` is None."""
        self.pending: int | None = None
        """The epoch of the sync that has begun."""
        self.proven = False
        """Nothing was written since digests of the weights were last read back."""
        self.commits: list[int] = []
        """The epoch of every commit so far."""
        self.pages: dict[int, int] = {}
        """Page -> number of the commit under which it was last written."""
        self.requests: set[str] = set()
        """Admitted under the commit in force, and not finished."""
        self.barred: dict[str, str] = {}
        """Not finished, and admitted under what is no longer in force -> what that was."""

    def begin_sync(self, epoch: int) -> None:
        """The weights are going to change: nothing is computed until `commit` of the same epoch."""
        if type(epoch) is not int or epoch < 0:
            raise GuardError(f"isoexec_begin_sync: epoch is {epoch!r}, not a number of updates", "send an int from 0")
        self.invalidate(f"the weight sync of epoch {epoch} has begun and was not committed")
        self.pending, self.proven = epoch, False

    def written(self) -> None:
        """Weights were changed; outside a sync that leaves nothing committed."""
        self.proven = False
        if self.pending is None:
            self.invalidate("weights were written outside a weight sync")

    def commit(self, epoch: int) -> None:
        """The weights of the sync that has begun are proven: compute with them."""
        if self.pending is None or type(epoch) is not int or epoch != self.pending:
            found = "no weight sync has begun" if self.pending is None else f"the sync that has begun is {self.pending}"
            raise GuardError(f"isoexec_commit: epoch is {epoch!r}, {found}", "begin the sync of this epoch again")
        if not self.proven:
            raise GuardError(
                f"isoexec_commit: weights of epoch {epoch} were written after their digests were read, or never read",
                "ask for isoexec_arrived after the last tensor",
            )
        if self.commits and epoch < self.commits[-1]:
            raise GuardError(
                f"isoexec_commit: epoch is {epoch}, the last one that was committed is {self.commits[-1]}",
                "weights do not go back: start the engine anew with the trainer",
            )
        self.epoch, self.pending = epoch, None
        self.commits.append(epoch)

    def invalidate(self, reason: str) -> None:
        """Nothing is committed any more, and a sync that has begun is void."""
        if self.epoch is not None:
            self.barred.update(dict.fromkeys(self.requests, f"epoch {self.epoch}, commit {len(self.commits)}"))
            self.requests.clear()
        self.epoch, self.pending, self.reason = None, None, reason

    def forget_pages(self) -> None:
        """The content of the cache is lost."""
        self.pages.clear()

    def admit(self, request: str, params: Any) -> None:
        """A new request must carry the committed epoch and say whether it is scored; `params` are vLLM's.

        One that is scored must sample from the distribution of the contract.
        """
        field = f"request {request}: sampling_params.extra_args.{EPOCH}"
        given = (getattr(params, "extra_args", None) or {}).get(EPOCH)
        if self.epoch is None:
            raise GuardError(f"{field} is {given!r}, the engine's epoch is None: {self.reason}", SYNC)
        if given is None:
            raise GuardError(f"{field} is None, the engine's epoch is {self.epoch}", "send it with every request")
        if type(given) is not int or given != self.epoch:
            raise GuardError(f"{field} is {given!r}, the engine's epoch is {self.epoch}", f"{SYNC} before generating")
        if type(asked := scored(params)) is not bool:
            raise GuardError(
                f"request {request}: sampling_params.extra_args.{SCORED} is {asked!r}, neither True nor False",
                "say with every request whether a trainer scores it",
            )
        if asked and self.temperature is not None and (found := changes(params, self.temperature)):
            raise GuardError(f"request {request}: {found}", "sample what is scored from the contract's distribution")
        self.requests.add(request)

    def proceed(self, requests: Collection[str]) -> None:
        """All of these may be computed: each was admitted under the commit in force."""
        if self.epoch is None and requests:
            raise GuardError(
                f"request {min(requests)}: the engine's epoch is None: {self.reason}, and it was to be continued", SYNC
            )
        if self.barred and (found := self.barred.keys() & requests):
            name = min(found)
            raise GuardError(
                f"request {name}: it was admitted under {self.barred[name]}, the engine's is epoch {self.epoch}, "
                f"commit {len(self.commits)}",
                "finish or abort requests before a weight sync",
            )

    def touch(self, pages: Iterable[int]) -> None:
        """These pages are written from now on."""
        self.pages.update(dict.fromkeys(pages, len(self.commits)))

    def hit(self, request: str, pages: Iterable[int]) -> None:
        """These pages are read by a request that did not write them."""
        now = len(self.commits)
        for page in pages:
            number = self.pages.get(page, 0)
            if number != now:
                wrote = f"epoch {self.commits[number - 1]}, commit {number}" if number else "no epoch that is known"
                raise GuardError(
                    f"request {request}: cached page {page} was written under {wrote}, the engine's is epoch "
                    f"{self.epoch}, commit {now}",
                    "reset the prefix cache with every weight sync",
                )

    def finish(self, requests: Iterable[str]) -> None:
        """These requests are over."""
        for request in requests:
            self.requests.discard(request)
            self.barred.pop(request, None)


class Group(NamedTuple):
    """Layers that share the pages of a request."""

    page_size: int
    """Tokens of a page."""
    recurrent: bool = False
    """A page holds a state: what is read of a prefix is its last page, and vLLM names no others."""


def review(guard: Guard, step: Any, groups: Sequence[Group]) -> None:
    """Refuse (GuardError) a step of vLLM's scheduler, a `SchedulerOutput`, that `guard` does not allow.

    `groups` are the engine's, in its order. Costs a loop over new requests and new pages. A refusal leaves nothing
    committed.
    """
    try:
        _review(guard, step, groups)
    except GuardError as error:
        guard.invalidate(f"a step was refused ({str(error).removeprefix(MARK).strip()})")
        raise


def _review(guard: Guard, step: Any, groups: Sequence[Group]) -> None:
    guard.finish(step.finished_req_ids)
    for new in step.scheduled_new_reqs:
        guard.admit(new.req_id, new.sampling_params)
    guard.proceed(step.num_scheduled_tokens.keys())
    hits: list[tuple[str, list[int]]] = []
    for new in step.scheduled_new_reqs:
        hits += _start(guard, new.req_id, new.block_ids, groups, new.num_computed_tokens)
    cached = step.scheduled_cached_reqs
    for request, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        if blocks is not None:
            hits += _start(guard, request, blocks, groups, computed if request in cached.resumed_req_ids else 0)
    for request, pages in hits:  # after all writes: a request may hit what another writes in the same step
        guard.hit(request, pages)


def _start(
    guard: Guard, request: str, blocks: tuple[list[int], ...], groups: Sequence[Group], computed: int
) -> list[tuple[str, list[int]]]:
    """Touches the pages behind the `computed` tokens of a prefix; returns those of the prefix that are read."""
    hits = []
    for pages, group in zip(blocks, groups, strict=True):
        count = -(-computed // group.page_size)
        guard.touch(pages[count:])
        if count:
            hits.append((request, pages[count - 1 : count] if group.recurrent else pages[:count]))
    return hits
