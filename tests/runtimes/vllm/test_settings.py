"""What the engine is told is strict, what it cannot compute exactly it refuses, and it says what it runs."""

import json
import re

import pytest

torch = pytest.importorskip("torch")

GOOD = {
    "contract": None,
    "enforce": False,
    "family": "qwen3",
    "kernels": "cpu",
    "schedule": {"num_leaves": 2, "kv_block": 16, "kv_partition": 512, "gdn_chunk": 64},
}


def changed(**parts: object) -> dict:
    return {"isoexec": GOOD | parts}


def without(key: str) -> dict:
    return {"isoexec": {name: value for name, value in GOOD.items() if name != key}}


BAD = {
    "absent": ({}, '"isoexec"\\] is missing'),
    "not a mapping": ({"isoexec": "qwen3"}, "not a mapping"),
    "unknown key": (changed(sede=1), "unknown keys \\['sede'\\]"),
    "missing key": (without("kernels"), "missing keys \\['kernels'\\]"),
    "nothing said of requests": (without("enforce"), "keys \\['enforce'\\]"),
    "a number for a truth value": (changed(enforce=1), '"enforce"\\] is 1'),
    "a contract and choices": (changed(contract="{}"), "unknown keys \\['family', 'kernels', 'schedule'\\]"),
    "no contract": ({"isoexec": {"contract": "{}", "enforce": True}}, "composition"),
    "wrong type": (changed(kernels=3), '"kernels"\\] is 3'),
    "unknown constant": (changed(schedule=GOOD["schedule"] | {"kv_blok": 1}), "kv_blok"),
    "missing constant": (changed(schedule={"num_leaves": 2}), "kv_block"),
}


@pytest.mark.parametrize("case", BAD)
def test_settings_are_strict(case: str) -> None:
    """Each refusal names the key."""
    from skyrl_isoexec.runtimes.vllm.settings import EngineSettings

    given, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        EngineSettings.from_additional_config(given)


def test_settings_round_trip() -> None:
    """What `engine_arguments` passes is what the worker reads."""
    from skyrl_isoexec.runtimes.vllm.settings import EngineSettings

    settings = EngineSettings.from_additional_config({"isoexec": GOOD})
    arguments = json.loads(json.dumps(settings.engine_arguments(dtype="bfloat16")))
    assert EngineSettings.from_additional_config(arguments["additional_config"]) == settings
    assert arguments["hf_overrides"] == {"architectures": ["IsoExecForCausalLM"]}
    assert arguments["dtype"] == "bfloat16"
    assert arguments["worker_cls"] == "skyrl_isoexec.runtimes.vllm.cpu_worker.GuardedCPUWorker"
    cuda = settings.engine_arguments(dtype="bfloat16", device="cuda")
    assert cuda["worker_cls"] == "skyrl_isoexec.runtimes.vllm.cuda_worker.GuardedWorker"
    with pytest.raises(ValueError, match="device is 'tpu'; supported: cpu, cuda"):
        settings.engine_arguments(dtype="bfloat16", device="tpu")


REFUSED = {
    "block_size": {"block_size": 24},
    "kv_cache_dtype": {"kv_cache_dtype": "fp8"},
    "settings": {"additional_config": {"isoexec": GOOD | {"kernel": "cpu"}}},
    "family": {"additional_config": {"isoexec": GOOD | {"family": "qwen9"}}},
    "kernels": {"additional_config": {"isoexec": GOOD | {"kernels": "cpus"}}},
    "worker_cls": {"additional_config": {"isoexec": GOOD | {"enforce": True}}, "worker_cls": "auto"},
}


@pytest.mark.parametrize("option", REFUSED)
def test_engines_refuse_by_name(start, checkpoint, option: str) -> None:
    """An engine that cannot be exact does not start, and says which option is at fault."""
    names = {"settings": "unknown keys \\['kernel'\\]", "family": "'qwen9'", "kernels": "cpus"}
    with pytest.raises(Exception, match=names.get(option, option)):
        start(checkpoint("float32"), "float32", **REFUSED[option])


def test_one_engine_a_process(start, checkpoint, generate) -> None:
    """The log-softmax belongs to the process, so an engine that was superseded refuses rather than use another's."""
    first = start(checkpoint("float32"), "float32")
    second = start(checkpoint("float32"), "float32", num_leaves=4)
    assert generate(second, [[1, 2, 3]])
    with pytest.raises(Exception, match="one engine per process"):
        generate(first, [[1, 2, 3]])


def test_native_engines_are_left_alone(host, checkpoint) -> None:
    """The plugin is loaded and a stock architecture computes stock log-probabilities."""
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.ops import logprobs

    logprobs.log_softmax_override = logprobs.token_logprobs_override = (
        None  # of an engine that an earlier test ran in this process
    )
    engine = LLM(
        str(checkpoint("float32")), dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=128, block_size=16, kv_cache_memory_bytes=2**22,
    )  # fmt: skip
    (out,) = engine.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4, logprobs=0), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 4
    assert logprobs.log_softmax_override is logprobs.token_logprobs_override is None
    assert engine.apply_model(lambda model: type(model).__name__) == ["Qwen3ForCausalLM"]


GRAPHS = {
    "compiled": ({"mode": "VLLM_COMPILE"}, "compilation_config.mode = 'VLLM_COMPILE'"),
    "piecewise": ({"graphs": "PIECEWISE"}, "compilation_config.cudagraph_mode = 'PIECEWISE'"),
    "a hybrid in the second runner": ({"hybrid": True}, "VLLM_USE_V2_MODEL_RUNNER = 1 0: .*no pages of states"),
    "two batches at once": ({"ubatching": True}, "enable_dbo = True"),
}


@pytest.mark.parametrize("case", ["as asked", "eager", "on the cpu", "the first runner", *GRAPHS])
def test_how_a_gpu_engine_runs_is_held_to(case: str, namespace) -> None:
    """vLLM's compilation, piecewise graphs and a runner without pages of states are refused on a GPU alone."""
    pytest.importorskip("vllm")
    from skyrl_isoexec.runtimes.vllm.checks import _graph_rules

    given = {"mode": "NONE", "graphs": "FULL_DECODE_ONLY", "runner": True, "ubatching": False, "hybrid": False}
    harmless = {"eager": {"graphs": "NONE"}, "the first runner": {"runner": False, "hybrid": True}}
    change, said = GRAPHS.get(case, (harmless.get(case, {}), ""))
    given |= change
    config = namespace(
        device_config=namespace(device_type="cpu" if case == "on the cpu" else "cuda"),
        compilation_config=namespace(
            mode=namespace(name=given["mode"]), cudagraph_mode=namespace(name=given["graphs"])
        ),
        parallel_config=namespace(use_ubatching=given["ubatching"]),
        use_v2_model_runner=given["runner"],
    )
    rules = _graph_rules(config, given["hybrid"])
    broken = [f"{name} = {value!r} {supported}" for name, value, holds, supported in rules if not holds]
    assert len(broken) == bool(said)
    assert all(re.search(said, line) for line in broken)


def test_arguments_of_a_gpu_engine() -> None:
    """Decode steps are captured whole, nothing is compiled, and the worker is the guarded one of CUDA."""
    from skyrl_isoexec.runtimes.vllm.settings import EngineSettings

    settings = EngineSettings.from_additional_config({"isoexec": GOOD})
    cpu = settings.engine_arguments(dtype="bfloat16")
    cuda = settings.engine_arguments(dtype="bfloat16", device="cuda")
    assert cuda.pop("compilation_config") == {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert cuda.pop("worker_cls").endswith("cuda_worker.GuardedWorker")
    assert {name: value for name, value in cpu.items() if name != "worker_cls"} == cuda
