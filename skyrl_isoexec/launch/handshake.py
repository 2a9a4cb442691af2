"""The launcher's questions to every process of a run, and its refusal if one is not what the contract says.

Before the first weight moves: facts of all. After the first rollouts were scored, before the first update: the kernels
that really served. Answers are kept in the run folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from ..contract import Contract, differences, encode
from .engines import EngineCallFailed, call
from .expectation import FactsRefused, expected, refuse, served, unlike

CONTRACT, FACTS, PROBE = "contract.json", "facts.json", "probe.json"


class Handshake:
    """Between a launcher and the processes of one run. The `actors` are the trainer's, in the order of their ranks."""

    def __init__(self, contract: Contract, folder: Path) -> None:
        self._contract, self._folder = contract, folder

    def start(self, actors: Sequence[Any], urls: Sequence[str]) -> None:
        """FactsRefused if any fact of any process differs, is missing or is unknown."""
        found = {
            "trainer": _ask(actors, "facts"),
            "engine": _call(urls, "isoexec_facts"),
        }
        (self._folder / FACTS).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        problems = []
        for role in ("trainer", "engine"):
            problems += self._counted(role, found[role])
            wanted = expected(self._contract, role)
            for process, facts in found[role].items():
                problems += differences(wanted, facts, process)
        refuse(problems)
        if self._contract.deployment["device"] == "cpu":  # on a GPU that both share, one of them is asleep here
            self._probe(actors, urls)

    def _counted(self, role: str, answers: Mapping[str, Any]) -> list[str]:
        side = self._contract.deployment[role]
        needed = side["tp"] * (side["pp"] * side["dp"] if role == "trainer" else side["num"])
        return [] if len(answers) == needed else [f"{len(answers)} processes of the {role} answered, it has {needed}"]

    def _probe(self, actors: Sequence[Any], urls: Sequence[str]) -> None:
        """One short forward in every process that holds a whole model must give the same bits.

        Finds what no fact names: a table, a hook, a replaced method. Trainer and engines hold the same checkpoint here.
        """
        asked = _ask(actors, "probe") | {name: one["probe"] for name, one in _call(urls, "isoexec_probe").items()}
        seen = {process: digest for process, digest in asked.items() if digest is not None}
        (self._folder / PROBE).write_text(json.dumps(asked, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        first = next(iter(seen), None)
        refuse(
            [
                f"{process}: probe is {digest[:16]}, {first} has {seen[first][:16]}: the same weights and the same "
                "contract give other log-probabilities there"
                for process, digest in seen.items()
                if digest != seen[first]
            ]
        )

    def scored(self, actors: Sequence[Any], urls: Sequence[str]) -> None:
        """FactsRefused unless the contract's kernels computed the rollouts and their scores."""
        scoring, problems = ("trainer_fwd_no_autograd",), []
        trainer = _ask(actors, "served")
        together: dict[str, Any] = {}
        for process, facts in trainer.items():
            problems += unlike(self._contract, scoring, facts, process)
            together.update({name: value for name, value in facts.items() if name.endswith(scoring)})
        problems += differences(served(self._contract, scoring), together, "the trainer's ranks together")
        for process, facts in _call(urls, "isoexec_served").items():
            # a step that mixes both counts as prefill, and small steps may all be mixed: a case may not have occurred
            occurred = tuple(c for c in ("engine_prefill", "engine_decode") if any(name.endswith(c) for name in facts))
            if not occurred:
                problems.append(f"{process}: no kernel served engine_prefill or engine_decode")
            problems += differences(served(self._contract, occurred), facts, process) if occurred else []
        refuse(problems)


def _call(urls: Sequence[str], method: str) -> dict[str, Any]:
    try:
        return call(urls, method)
    except EngineCallFailed as error:
        raise FactsRefused(f"an engine worker cannot answer: {error}") from error


def _ask(actors: Sequence[Any], method: str) -> dict[str, Any]:
    """{process: answer} of the trainer's ranks; in a thread of its own, because Ray must not block an event loop."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            answers = pool.submit(ray.get, [getattr(actor, method).remote() for actor in actors]).result()
        except RayTaskError as error:
            raise FactsRefused(f"a trainer rank cannot answer for its {method}: {error.cause}") from error
    return {f"trainer rank {rank}": answer for rank, answer in enumerate(answers)}


def write_contract(contract: Contract, folder: Path) -> None:
    """The contract's bytes in the run folder; an earlier part of a resumed run keeps its own under a number."""
    path = folder / CONTRACT
    if path.exists() and path.read_bytes() != encode(contract):
        number = len(list(folder.glob("contract.*.json"))) + 1
        path.rename(folder / f"contract.{number}.json")
    path.write_bytes(encode(contract))
