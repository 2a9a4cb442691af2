"""The guard by itself, over steps as vLLM's scheduler describes them: what it refuses and allows, and its words."""

from types import SimpleNamespace

import pytest

from skyrl_isoexec.runtimes.vllm.guard import Group, Guard, GuardError, review

PAGE = 16
ATTENTION = (Group(PAGE),)
BOTH = (Group(PAGE, recurrent=True), Group(PAGE))


def synced(epoch: int = 3, guard: Guard | None = None) -> Guard:
    """A guard after a whole sync."""
    guard = Guard() if guard is None else guard
    guard.begin_sync(epoch)
    guard.written()
    guard.proven = True
    guard.commit(epoch)
    return guard


def new(name: str, *pages: list[int], computed: int = 0, **extra_args: object) -> SimpleNamespace:
    """A request that the scheduler sends for the first time, with the pages of each group."""
    sampling = SimpleNamespace(extra_args={"isoexec_scored": True, **extra_args})
    return SimpleNamespace(req_id=name, sampling_params=sampling, block_ids=pages, num_computed_tokens=computed)


def step(*fresh: SimpleNamespace, cached: dict | None = None, resumed: tuple = (), finished: tuple = ()):
    """One `SchedulerOutput`; `cached` is {request: (new pages of each group or None, ..., computed tokens)}."""
    cached = cached or {}
    names = [one.req_id for one in fresh] + list(cached)
    return SimpleNamespace(
        scheduled_new_reqs=list(fresh),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=set(resumed),
            new_block_ids=[None if pages[0] is None else tuple(pages) for *pages, _ in cached.values()],
            num_computed_tokens=[computed for *_, computed in cached.values()],
        ),
        num_scheduled_tokens=dict.fromkeys(names, 1),
        finished_req_ids=set(finished),
    )


def run(guard: Guard, *steps: SimpleNamespace, groups: tuple[Group, ...] = ATTENTION) -> None:
    """Review each of the steps."""
    for one in steps:
        review(guard, one, groups)


def test_a_request_runs_from_start_to_end() -> None:
    """Prefill in pieces, decode into a new page, preemption that finds its own pages again, end."""
    guard = synced()
    first = new("a", [1, 2], isoexec_epoch=3)
    run(guard, step(first), step(cached={"a": ([3], 32)}), step(cached={"a": (None, 33)}))
    run(guard, step(cached={"a": ([1, 2, 7], 32)}, resumed=("a",)), step(finished=("a",)))
    assert guard.pages.keys() == {1, 2, 3, 7} and not guard.requests


def test_a_preempted_request_that_comes_as_a_new_one() -> None:
    """vLLM's second runner is sent it whole: it finds its own pages again, but not those of another commit."""
    guard = synced()
    run(guard, step(new("a", [1, 2], isoexec_epoch=3)), step(cached={"a": ([3], 32)}))
    run(guard, step(new("a", [1, 2, 7], computed=32, isoexec_epoch=3)), step(cached={"a": (None, 33)}))
    assert guard.requests == {"a"} and guard.pages.keys() == {1, 2, 3, 7}
    for computed in (32, 0):
        again = synced(3, synced(3))
        run(again, step(new("a", [1, 2], isoexec_epoch=3)))
        synced(3, again)
        with pytest.raises(GuardError, match="request a: it was admitted under epoch 3, commit 2, .* commit 3"):
            run(again, step(new("a", [1, 2, 7], computed=computed, isoexec_epoch=3)))


def test_a_page_that_another_request_writes_in_the_same_step() -> None:
    """vLLM may cache a page before it is written: the reader is reviewed after all writers, in either order."""
    writer, reader = new("w", [4, 5], isoexec_epoch=3), new("r", [4, 6], computed=16, isoexec_epoch=3)
    for order in ((writer, reader), (reader, writer)):
        run(synced(), step(*order))


def test_nothing_runs_before_the_first_sync() -> None:
    """An engine that loaded a checkpoint is not one that received weights."""
    with pytest.raises(GuardError, match="^isoexec refused: request a: .*isoexec_epoch is 0, .* epoch is None"):
        run(Guard(), step(new("a", [1], isoexec_epoch=0)))
    run(Guard(), step())


@pytest.mark.parametrize("given", [None, 2, 4, "3", 3.0, True])
def test_the_epoch_of_a_request(given: object) -> None:
    """Absent, of another sync, or no integer: one line that names both values and the mend."""
    guard = synced()
    extra = {} if given is None else {"isoexec_epoch": given}
    with pytest.raises(GuardError) as refusal:
        run(guard, step(new("a", [1], **extra)))
    message = str(refusal.value)
    assert message.startswith("isoexec refused: request a: sampling_params.extra_args.isoexec_epoch is")
    assert repr(given) in message and "the engine's epoch is 3; " in message and "\n" not in message
    with pytest.raises(GuardError, match="a step was refused .request a"):
        run(guard, step(new("b", [2], isoexec_epoch=3)))  # the rest of that step was not computed either


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("epoch", [3, 4])
def test_a_stale_page(epoch: int, resumed: bool) -> None:
    """A page of an earlier commit, of the same epoch too; a page that is written again is fresh."""
    guard = synced()
    run(guard, step(new("a", [1, 2], isoexec_epoch=3)), step(finished=("a",)))
    synced(epoch, guard)
    run(guard, step(new("b", [2], isoexec_epoch=epoch)), step(finished=("b",)))
    run(guard, step(new("c", [2, 3], computed=16, isoexec_epoch=epoch)))
    hit = step(new("d", [1, 3], computed=16, isoexec_epoch=epoch))
    if resumed:
        hit = step(cached={"c": ([1, 3], 16)}, resumed=("c",))
    with pytest.raises(GuardError, match=f"page 1 .* under epoch 3, commit 1, .* epoch {epoch}, commit 2; reset"):
        run(guard, hit)


def test_a_page_that_nobody_wrote() -> None:
    """No record is a refusal."""
    with pytest.raises(GuardError, match="page 9 was written under no epoch that is known"):
        run(synced(), step(new("a", [9, 10], computed=16, isoexec_epoch=3)))


def test_pages_of_states() -> None:
    """Of a prefix only the last state is read, vLLM names its null page for the others, and may free them early."""
    guard = synced()
    run(guard, step(new("a", [1, 2, 3], [4, 5, 6], isoexec_epoch=3)), groups=BOTH)
    run(guard, step(cached={"a": ([7], [8], 48)}), step(finished=("a",)), groups=BOTH)
    hit = {"computed": 2 * PAGE, "isoexec_epoch": 3}
    run(guard, step(new("b", [0, 2, 9], [4, 5, 10], **hit)), step(finished=("b",)), groups=BOTH)
    run(guard, step(cached={"c": ([0, 2, 9], [4, 5, 10], 2 * PAGE)}, resumed=("c",)), groups=BOTH)
    for wrong in ([0, 0, 9], [0, 11, 9]):
        with pytest.raises(GuardError, match=f"cached page {wrong[1]} was written under no epoch that is known"):
            run(synced(3, guard), step(new(f"d{wrong[1]}", wrong, [4, 5, 10], **hit)), groups=BOTH)


@pytest.mark.parametrize("stale", ["state", "keys and values"])
def test_a_stale_page_of_either_group(stale: str) -> None:
    """The other group's page is written again, and does not excuse it."""
    guard = synced()
    run(guard, step(new("a", [1, 2], [3, 4], isoexec_epoch=3)), step(finished=("a",)), groups=BOTH)
    synced(4, guard)
    fresh = ([9], [3]) if stale == "state" else ([1], [9])
    run(guard, step(new("b", *fresh, isoexec_epoch=4)), step(finished=("b",)), groups=BOTH)
    with pytest.raises(GuardError, match=f"page {1 if stale == 'state' else 3} .* under epoch 3, commit 1, "):
        run(guard, step(new("c", [1, 5], [3, 6], computed=PAGE, isoexec_epoch=4)), groups=BOTH)


def test_one_page_of_states_for_a_sequence() -> None:
    """Without a prefix cache the groups' pages differ in size, and a request that resumes starts from nothing."""
    guard, groups = synced(), (Group(256, recurrent=True), Group(PAGE))
    run(guard, step(new("a", [1], [2, 3], isoexec_epoch=3)), groups=groups)
    run(guard, step(cached={"a": ([4], [5, 6, 7], 0)}, resumed=("a",)), groups=groups)
    assert guard.pages.keys() == {1, 2, 3, 4, 5, 6, 7}
    with pytest.raises(ValueError, match="zip"):
        run(guard, step(new("b", [8], isoexec_epoch=3)), groups=groups)


def test_a_request_does_not_outlive_a_sync() -> None:
    """Its pages are of the old weights; when it is gone, its name may be used again."""
    guard = synced()
    run(guard, step(new("a", [1], isoexec_epoch=3), new("b", [2], isoexec_epoch=3)))
    synced(4, guard)
    run(guard, step(new("c", [3], isoexec_epoch=4), finished=("a",)), step(new("a", [4], isoexec_epoch=4)))
    with pytest.raises(GuardError, match="request b: it was admitted under epoch 3, commit 1, .* is epoch 4, commit 2"):
        run(guard, step(cached={"b": (None, 5), "c": (None, 5)}))


def test_sleep_and_other_writes_invalidate() -> None:
    """Whatever the reason, it is in the message; also for a request that is running."""
    guard = synced()
    run(guard, step(new("a", [1], isoexec_epoch=3)))
    guard.invalidate("the engine was put to sleep")
    with pytest.raises(GuardError, match="request a: the engine's epoch is None: the engine was put to sleep"):
        run(guard, step(cached={"a": (None, 2)}))
    synced(4, guard)
    guard.written()
    with pytest.raises(GuardError, match="weights were written outside a weight sync"):
        run(guard, step(new("b", [1], isoexec_epoch=4)))


def test_a_sync_is_whole_or_nothing() -> None:
    """Commits without a beginning, of another epoch, after a wake-up, or of weights whose digests nobody read."""
    guard = Guard()
    for epoch in (-1, True, "0", None):
        with pytest.raises(GuardError, match="isoexec_begin_sync: epoch is"):
            guard.begin_sync(epoch)
    with pytest.raises(GuardError, match="isoexec_commit: epoch is 1, no weight sync has begun"):
        guard.commit(1)
    guard.begin_sync(2)
    with pytest.raises(GuardError, match="isoexec_commit: epoch is 1, the sync that has begun is 2"):
        guard.commit(1)
    with pytest.raises(GuardError, match="epoch 2 were written after their digests were read"):
        guard.commit(2)
    guard.proven = True
    guard.written()
    with pytest.raises(GuardError, match="epoch 2 were written after their digests were read"):
        guard.commit(2)
    guard.proven = True
    guard.invalidate("the engine was woken up")
    with pytest.raises(GuardError, match="no weight sync has begun"):
        guard.commit(2)
    assert synced(2, guard).epoch == 2


def test_weights_do_not_go_back() -> None:
    """An epoch below the last one that was committed is refused, also after a sleep; the same one may come again."""
    guard = synced(3, synced(3))
    guard.invalidate("the engine was put to sleep")
    guard.begin_sync(2)
    guard.proven = True
    with pytest.raises(GuardError, match="isoexec_commit: epoch is 2, the last one that was committed is 3; weigh"):
        guard.commit(2)
    with pytest.raises(GuardError, match="epoch is None: the weight sync of epoch 2 has begun"):
        run(guard, step(new("a", [1], isoexec_epoch=3)))
    assert synced(4, guard).epoch == 4


def test_the_guard_needs_no_vllm() -> None:
    """Nor torch: a launcher may read its constants."""
    import subprocess
    import sys

    code = (
        "import sys, skyrl_isoexec.runtimes.vllm.guard, skyrl_isoexec.runtimes.vllm.settings; "
        "assert not {'vllm', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
