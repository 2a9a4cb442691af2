"""A step is held to readiness and counted for its operators, whether Python computes it or a graph that runs none."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from skyrl_isoexec.kernels.bundle import load_kernels
from skyrl_isoexec.runtimes.vllm.steps import REHEARSED, Steps, without_rehearsal
from skyrl_isoexec.schedule import Schedule


class Engine:
    """Steps over real kernels; `layers` stands for what the model's Python would call."""

    def __init__(self) -> None:
        import torch

        self.ids, self.table = torch.zeros(1, dtype=torch.int64), torch.ones(2, 4)
        self.kernels = load_kernels("cpu", Schedule())
        self.reasons: list[str] = []
        self.steps = Steps(self.kernels, self.ready)

    def ready(self) -> None:
        if self.reasons:
            raise RuntimeError(self.reasons[0])

    def eager(self, case: str) -> None:
        self.steps.begin(case)
        self.steps.forward(case)
        self.kernels.embedding(self.ids, self.table)
        self.logits()

    def replay(self, case: str) -> None:
        self.steps.begin(case)
        self.logits()

    def capture(self) -> None:
        with self.steps.rehearsal():
            self.eager("engine_prefill")

    def logits(self) -> None:
        self.steps.end()
        self.kernels.logprobs(self.table)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_rehearsal_serves_nobody(engine: Engine) -> None:
    engine.capture()
    assert engine.kernels.served == {("embedding", REHEARSED)}
    assert without_rehearsal(engine.kernels.served_facts()) == {}
    assert engine.kernels.case is None and engine.steps.replays == 0


def test_a_replay_counts_what_was_captured(engine: Engine) -> None:
    engine.capture()
    engine.replay("engine_decode")
    assert engine.steps.replays == 1
    assert without_rehearsal(engine.kernels.served_facts()) == {
        "served.embedding.engine_decode": "skyrl_isoexec.kernels.embedding.cpu",
        "served.logprob.engine_decode": "skyrl_isoexec.kernels.logprob.cpu",
    }


def test_python_counts_as_it_computes(engine: Engine) -> None:
    engine.eager("engine_prefill")
    assert engine.kernels.served == {("embedding", "engine_prefill"), ("logprob", "engine_prefill")}
    assert engine.steps.replays == 0


def test_nothing_recorded_is_refused(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="no operator was recorded"):
        engine.replay("engine_decode")


def test_unready_weights_stop_a_replay(engine: Engine) -> None:
    engine.capture()
    engine.reasons.append("the weights are incomplete")
    with pytest.raises(RuntimeError, match="incomplete"):
        engine.replay("engine_decode")


def test_a_dummy_without_a_cache_counts_as_nothing(engine: Engine) -> None:
    engine.reasons.append("not looked at")
    engine.steps.forward(None)
    engine.kernels.embedding(engine.ids, engine.table)
    assert engine.kernels.served == set()
