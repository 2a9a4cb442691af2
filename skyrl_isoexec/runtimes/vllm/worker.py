"""vLLM's workers with a guard before every step, chosen by the engine argument `worker_cls`.

A worker decodes its settings when it is made, so an engine without them does not start. Where the settings say
`enforce`, every step of the scheduler passes `guard.review` first; the engine's own dummy and profiling runs are no
steps. Without it the guard only keeps the books of weight syncs.

The classes are in `cpu_worker` and `cuda_worker`: vLLM's worker for the CPU changes torch when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec

from skyrl_isoexec.runtimes.vllm.guard import Group, Guard, GuardError, review
from skyrl_isoexec.runtimes.vllm.sampling import contract_temperature
from skyrl_isoexec.runtimes.vllm.settings import EngineSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

CACHE_TAG = "kv_cache"


class Guarded:
    """Stands before one of vLLM's workers in the order of bases. Methods named isoexec_ are for `collective_rpc`."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self.isoexec_settings = EngineSettings.from_additional_config(vllm_config.additional_config)
        self.isoexec_guard = Guard(contract_temperature(self.isoexec_settings.decoded))
        self.isoexec_asleep = False
        """The memory of the weights was given away."""
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, **options: Any) -> None:
        """As vLLM's; from then on the guard knows of every tensor that the model takes."""
        super().load_model(**options)
        if self.isoexec_guard.commits:
            self.isoexec_guard.written()
        self.model_runner.get_model().loader.on_write = self.isoexec_guard.written

    def determine_available_memory(self) -> int:
        """As vLLM's, which may capture graphs to see how large they are; nothing of it is a step."""
        with self.model_runner.get_model().steps.rehearsal():
            return super().determine_available_memory()

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's, which captures the graphs of decode steps on dummy rows."""
        with self.model_runner.get_model().steps.rehearsal():
            return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """As vLLM's; GuardError for a step that the committed weights do not serve.

        The second runner warms up by steps of its own making, in a rehearsal: they serve nobody.
        """
        if self.isoexec_settings.enforce and not self.model_runner.get_model().steps.rehearsing:
            review(self.isoexec_guard, scheduler_output, self.isoexec_groups())
        return super().execute_model(scheduler_output)

    def isoexec_groups(self) -> list[Group]:
        """Of layers, as the live cache is paged."""
        specs = [group.kv_cache_spec for group in self.model_runner.kv_cache_config.kv_cache_groups]
        return [Group(spec.block_size, isinstance(spec, MambaSpec)) for spec in specs]

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """As vLLM's; tensors in another format than a checkpoint's would pass by our loader."""
        if not is_checkpoint_format:
            raise ValueError("start_weight_update: is_checkpoint_format is False; supported: True")
        self.isoexec_guard.written()
        super().start_weight_update(is_checkpoint_format)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's; weights change."""
        self.isoexec_guard.written()
        super().update_weights(update_info)

    def finish_weight_update(self) -> None:
        """As vLLM's, which puts in place what it held back."""
        self.isoexec_guard.written()
        super().finish_weight_update()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; weights change."""
        self.isoexec_guard.written()
        super().reload_weights(*args, **kwargs)

    def apply_model(self, fn: Callable[[Any], Any]) -> Any:
        """As vLLM's; nobody knows what a function does to a model, so it counts as a change of the weights."""
        self.isoexec_guard.written()
        return super().apply_model(fn)

    def sleep(self, level: int = 1) -> None:
        """As vLLM's; the next request needs a weight sync."""
        self.isoexec_guard.invalidate("the engine was put to sleep, and no weight sync was committed since")
        self.isoexec_asleep = self.vllm_config.model_config.enable_sleep_mode
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """As vLLM's; the next request needs a weight sync, unless only the memory of the cache came back."""
        self.isoexec_guard.forget_pages()
        others = tags is None or bool(set(tags) - {CACHE_TAG})
        if others:
            self.isoexec_guard.invalidate("the engine was woken up, and no weight sync was committed since")
        super().wake_up(tags)
        if others:
            self.isoexec_asleep = False
            self.model_runner.get_model().restore_table()

    def isoexec_begin_sync(self, epoch: int) -> dict[str, int]:
        """Weights of `epoch`, will come; until they are committed nothing is computed."""
        self.isoexec_guard.begin_sync(epoch)
        return {"begun": epoch}

    def isoexec_places(self) -> dict[str, dict[str, Any]]:
        """For every parameter: its place in the whole tensor. Reads no memory, so a sleeping worker can answer."""
        return self.model_runner.get_model().loader.places()

    def isoexec_arrived(self) -> dict[str, dict[str, Any]]:
        """What lies in memory. For every parameter: its place in the whole tensor, and the digest of its bytes."""
        found = self.model_runner.get_model().loader.arrived()
        self.isoexec_guard.proven = True
        return found

    def isoexec_commit(self, epoch: int, contract_digest: str | None) -> dict[str, int]:
        """What arrived is what was sent: from now on requests of `epoch` are served.

        LoadError if tensors are missing, or if what is derived from the weights is not theirs.
        """
        own = self.isoexec_settings.contract_digest
        if contract_digest != own:
            raise GuardError(
                f"isoexec_commit: contract_digest is {contract_digest!r}, this engine's contract has {own!r}",
                "start both sides with the same contract",
            )
        self.model_runner.get_model().loader.check()
        self.isoexec_guard.commit(epoch)
        return {"committed": epoch}
