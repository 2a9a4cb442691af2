"""The guarded worker by itself, and what facts say of the runner below it: no engine is started."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")


class Base:
    """In the place of vLLM's worker."""

    def execute_model(self, step: object) -> str:
        return "computed"


def worker(enforce: bool, rehearsing: bool):
    from skyrl_isoexec.runtimes.vllm.guard import Guard
    from skyrl_isoexec.runtimes.vllm.worker import Guarded

    made = type("Worker", (Guarded, Base), {"__init__": lambda self: None})()
    made.isoexec_settings, made.isoexec_guard = SimpleNamespace(enforce=enforce), Guard()
    model = SimpleNamespace(steps=SimpleNamespace(rehearsing=rehearsing))
    cache = SimpleNamespace(kv_cache_groups=[])
    made.model_runner = SimpleNamespace(get_model=lambda: model, kv_cache_config=cache)
    return made


STEP = SimpleNamespace(
    scheduled_new_reqs=[
        SimpleNamespace(req_id="_warmup_0_", sampling_params=None, block_ids=(), num_computed_tokens=0)
    ],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]),
    num_scheduled_tokens={"_warmup_0_": 2},
    finished_req_ids=set(),
)
"""As vLLM's second runner makes it to warm up: without an epoch."""


def test_a_rehearsal_passes_the_guard_and_nothing_else_does() -> None:
    """A runner's own warm-up is computed before any sync; the same step of a scheduler is refused."""
    from skyrl_isoexec.runtimes.vllm.guard import GuardError

    assert worker(enforce=True, rehearsing=True).execute_model(STEP) == "computed"
    assert worker(enforce=False, rehearsing=False).execute_model(STEP) == "computed"
    with pytest.raises(GuardError, match="request _warmup_0_: .* the engine's epoch is None"):
        worker(enforce=True, rehearsing=False).execute_model(STEP)


def test_the_runner_is_read_from_its_class() -> None:
    """The second one takes no processors of logits: its sampler itself is looked at."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from skyrl_isoexec.runtimes.vllm.facts import foreign_processors, runner

    second = type("GPUModelRunner", (), {"__module__": "vllm.v1.worker.gpu.model_runner"})
    first = GPUModelRunner.__new__(GPUModelRunner)
    first.input_batch = SimpleNamespace(logitsprocs=LogitsProcessors())
    assert runner(SimpleNamespace(model_runner=first)) == 1
    assert foreign_processors(SimpleNamespace(model_runner=first)) == ""
    other = second()
    other.sampler = Sampler.__new__(Sampler)
    assert runner(SimpleNamespace(model_runner=other)) == 2
    assert foreign_processors(SimpleNamespace(model_runner=other)) == ""
    other.sampler = SimpleNamespace()
    assert foreign_processors(SimpleNamespace(model_runner=other)) == "types.SimpleNamespace"
