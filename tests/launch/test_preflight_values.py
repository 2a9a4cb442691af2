"""Values that no run can have are refused, by name, before anything is started or left."""

import dataclasses
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from skyrl_isoexec.gate.record import GateError
from skyrl_isoexec.launch import main as launcher
from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.folder import vacant
from skyrl_isoexec.launch.preflight import check, distribution, machine, model, ranges, sequence

ENGINE, PARAMS = "generator.inference_engine", "generator.sampling_params"
OPTIMIZER, SAMPLING = "trainer.policy.optimizer_config", "trainer.algorithm.dynamic_sampling"

TINY = (
    "model.shape={hidden_size: 32, intermediate_size: 32, num_layers: 1}",
    "task.base.steps=1",
    "task.base.batch_size=4",
    "task.digits=1",
)
"""A base checkpoint that takes no time."""

VALUES = {
    "trainer.train_batch_size=0": "train_batch_size=0 is not positive",
    "trainer.policy_mini_batch_size=0": "policy_mini_batch_size=0 is not positive",
    "trainer.max_training_steps=0": "max_training_steps=0 is not positive",
    "trainer.train_batch_size=4": "policy_mini_batch_size=8 is more than trainer.train_batch_size=4",
    "trainer.epochs=0": "epochs=0 is not positive",
    "trainer.max_prompt_length=0": "max_prompt_length=0 is not positive",
    f"{PARAMS}.max_generate_length=0": "max_generate_length=0 is not positive",
    "generator.n_samples_per_prompt=0": "n_samples_per_prompt=0 is not positive",
    f"{OPTIMIZER}.lr=-1": "lr=-1 is not between 0 and 1",
    f"{OPTIMIZER}.adam_betas=[0.9]": "are not two numbers",
    f"{OPTIMIZER}.num_warmup_steps=1000": "num_warmup_steps=1000 is not below",
    "trainer.seed=-1": "seed=-1 is not between",
    "trainer.seed=99999999999": "seed=99999999999 is not between",
    "trainer.eval_interval=0": "-1 for off",
    "trainer.ckpt_interval=-5": "-1 for off",
    f"{SAMPLING}.max_sample_batches=0": "-1 for off",
    f"{SAMPLING}.type=foo": "type=foo is unknown; choose one of null, filter, replace",
    "trainer.logger=foo": "logger=foo is unknown",
    "trainer.logger=mlflow": "the package mlflow is not installed",
    "environment.env_class=foo": "environment.env_class=foo is unknown",
    "trainer.resume_mode=foo": "resume_mode=foo is unknown",
    "trainer.resume_mode=from_path": "trainer.resume_path=None is not a folder",
    f"{ENGINE}.max_num_seqs=0": "max_num_seqs=0 is not positive",
    f"{ENGINE}.max_num_batched_tokens=7": "max_num_batched_tokens=7 is below",
    f"{ENGINE}.router_init_kwargs.port=99999999": "is not a port",
    f"{PARAMS}.temperature=-1": "temperature=-1 is not between",
    f"{PARAMS}.temperature=0.001": "temperature=0.001 is not between 0.01",
    f"+{ENGINE}.engine_init_kwargs.num_gpu_blocks_override=0": "num_gpu_blocks_override=0 is not positive",
    "generator.chat_template.name_or_path=foo": "a trainer has to see those that were sampled; set it to null",
    f"{ENGINE}.enforce_eager=false": "enforce_eager=false with runtime=cpu: a CPU captures no graphs",
    "topology.trainer.dp=3": "topology.trainer.dp=3 does not divide the 128 samples of a mini-batch",
    "data.dataloader.num_workers=100000": "num_workers=100000 is not between",
    f"{PARAMS}.logprobs=null": "logprobs=null",
    f"{PARAMS}.logprobs=-1": "logprobs=-1",
    f"{PARAMS}.top_p=0.9": "top_p=0.9 changes the distribution",
    f"+{PARAMS}.additional_kwargs.top_k=3": "additional_kwargs.top_k might change the distribution",
    "runtime.object_store_mib=1": "runtime.object_store_mib=1 is below the 75 MiB",
    "runtime.kv_cache_mib=1000000000": "and this machine has",
    "runtime.threads=100000": "cores of this machine",
}


@pytest.mark.parametrize("arm", ["isoexec", "native"])
@pytest.mark.parametrize("override", VALUES, ids=str)
def test_values_that_no_run_has(override: str, arm: str) -> None:
    """Both arms need what both need."""
    launch, cfg = compose([f"+exec={arm}", override])
    with pytest.raises(ValueError, match=re.escape(VALUES[override])):
        check(launch, cfg)


def test_a_warm_up_longer_than_the_epochs() -> None:
    _, cfg = compose(["+exec=isoexec", "trainer.max_training_steps=null", "trainer.epochs=1"])
    ranges.warmup(cfg, prompts=32 * 3)
    with pytest.raises(ValueError, match="num_warmup_steps=8 is not below the run's 8 optimizer steps"):
        ranges.warmup(cfg, prompts=32 * 3 - 1)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_mends_of_a_warm_up(steps: int) -> None:
    """What the refusal proposes is then not refused; run=short is what the refusal says."""
    short = f"trainer.max_training_steps={steps}"
    _, cfg = compose(["+exec=isoexec", short])
    with pytest.raises(ValueError, match="or choose run=short, which warms up in 2 of 6$") as refused:
        ranges.warmup(cfg, prompts=10**4)
    mend, most = re.search(rf"set ({OPTIMIZER}\.num_warmup_steps=\d+), (\d+) at most", str(refused.value)).groups()
    for override in (mend, f"{OPTIMIZER}.num_warmup_steps={most}"):
        ranges.warmup(compose(["+exec=isoexec", short, override])[1], prompts=10**4)
    _, cfg = compose(["+exec=isoexec", "run=short"])
    trainer = cfg.trainer
    updates = trainer.max_training_steps * trainer.train_batch_size // trainer.policy_mini_batch_size
    assert (trainer.policy.optimizer_config.num_warmup_steps, updates) == (2, 6)


@pytest.mark.parametrize("key", ["ckpt", "export"])
def test_places_that_cannot_be_saved_in(key: str) -> None:
    interval = {"ckpt": "ckpt_interval", "export": "hf_save_interval"}[key]
    _, cfg = compose(["+exec=isoexec", f"trainer.{key}_path=/dev/null/x", f"trainer.{interval}=1"])
    with pytest.raises(ValueError, match=f"trainer.{key}_path=/dev/null/x is not a folder"):
        ranges.resume(cfg)


def test_default_passes() -> None:
    for arm in ("isoexec", "native"):
        launch, cfg = compose([f"+exec={arm}"])
        for refuse in (ranges.numbers, ranges.names, ranges.updates, distribution.sampling):
            refuse(cfg)
        model.scheduling(cfg, "cpu")
        machine.memory(launch)
        model.layouts(model.planned(launch), launch)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["+exec=isoexec", "topology.trainer.pp=4"], "topology.trainer.pp=4 does not divide the model's 2 layers"),
        (
            ["+exec=isoexec", "topology.trainer.ep=2"],
            "topology.trainer.ep=2: every layer of this model is dense, and only experts are cut by it; set "
            "topology.trainer.ep=1",
        ),
        (
            ["+exec=isoexec", "model=tiny_moe", "topology.trainer.ep=3"],
            "topology.trainer.ep=3: num_experts = 8 is not divisible by expert-parallel size 3; choose a degree that",
        ),
        (["+exec=isoexec", "kernels.num_leaves=1024"], "kernels.num_leaves=1024: num_heads * head_dim = 256"),
        (["+exec=isoexec", "topology.trainer.tp=32"], "topology.trainer.tp=32: num_heads = 8"),
        (["+exec=isoexec", "topology.engine.tp=8"], "topology.engine.tp=8: num_kv_heads = 4"),
        (["+exec=isoexec", "model.shape.num_layers=100000"], "model.shape has about 30310 million parameters"),
        (["+exec=native", "topology.engine.tp=16"], "topology.engine.tp=16 does not divide the model"),
        (["+exec=native", "model.shape.head_dim=16"], "head_dim = 16 with exec=native"),
    ],
)
def test_layouts_that_do_not_divide_the_model(arguments: list[str], named: str) -> None:
    """Known from the shape, so refused before a base checkpoint is trained; under the name that was set."""
    launch, _ = compose(arguments)
    with pytest.raises(ValueError, match=re.escape(named)):
        model.layouts(model.planned(launch), launch)


def test_head_sizes_are_the_engines_own() -> None:
    folder = next(iter(find_spec("vllm").submodule_search_locations))
    text = (Path(folder) / "v1/attention/backends/cpu_attn.py").read_text(encoding="utf-8")
    assert f"return [{', '.join(map(str, model.NATIVE_HEAD_DIMS))}]" in text


def test_a_folder_that_cannot_be_a_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "old" / "data").mkdir(parents=True)
    for folder, named in (("file/run", "cannot be made"), ("file", "is a file"), ("old", "is not empty")):
        with pytest.raises(ValueError, match=named):
            vacant(tmp_path / folder, checkpoints=None)
    with pytest.raises(ValueError, match="cannot be"):
        vacant(tmp_path / ("x" * 300), checkpoints=None)


@pytest.mark.parametrize("side", ["policy", "ref"])
@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ("moe_aux_loss_coeff=0.1", "leave it 0 or None"),
        ("moe_router_load_balancing_type=aux_loss", "leave it 'none' or None"),
        ("moe_router_enable_expert_bias=true", "never updated; leave it None or False"),
        ("moe_router_score_function=sigmoid", "leave it None or 'softmax'"),
        ("moe_router_dtype=fp64", "leave it 'fp32' or None"),
        ("freeze_moe_router=true", "leave it False or None"),
    ],
)
def test_what_a_router_does_not_compute(setting: str, kept: str, side: str) -> None:
    """Auxiliary losses, updates of a bias, another scoring; the stock arm has its own router."""
    override = f"trainer.{side}.megatron_config.{setting}"
    launch, cfg = compose(["+exec=isoexec", "model=tiny_moe", override])
    with pytest.raises(ValueError, match=re.escape(override.partition("=")[0]) + ".*" + re.escape(kept)):
        model.router(model.planned(launch), launch, cfg)
    launch, cfg = compose(["+exec=native", "model=tiny_moe", override])
    model.router(model.planned(launch), launch, cfg)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("kernels.kv_block=8", "kv_block 8"),
        pytest.param(
            "runtime=cuda",
            "torch sees no CUDA device; choose runtime=cpu kernels=cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        ("trainer.train_batch_size=33", "SkyRL refuses"),
        ("exec.name=native", "exec.name=native contradicts exec=isoexec"),
        ("trainer.max_prompt_length=3", "prompts in"),
        ("task.cache_dir=/dev/null/x", "task.cache_dir=/dev/null/x"),
        ("model.path=nowhere", "model.path=nowhere is not a folder"),
    ],
)
def test_refused_before_anything_is_left(
    override: str,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole command line: code 2, one line, and not even a folder."""
    folder = tmp_path / "run"
    monkeypatch.setattr(launcher, "_run", lambda *_: pytest.fail("the run was started"))
    with pytest.raises(SystemExit) as ended:
        launcher.main(["+exec=isoexec", *TINY, f"task.cache_dir={tmp_path / 'cache'}", override, f"run_dir={folder}"])
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and named in lines[0], lines
    assert not folder.exists()


def test_help_beside_a_stack(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launcher.main(["+exec=isoexec", "--help"])
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0, 0.25])
def test_powers_of_two_divide_exactly_on_a_gpu(temperature: float) -> None:
    distribution.division(temperature)


@pytest.mark.parametrize("temperature", [0.7, 0.6, 1.5])
def test_other_temperatures_are_refused_on_a_gpu(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature={temperature} with runtime.device=cuda"):
        distribution.division(temperature)


@pytest.mark.parametrize("name", ["step_3", "global_step_", "global_step_3"])
def test_a_folder_that_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    """Only the name of a step's folder with a trainer's state in it is one."""
    folder = tmp_path / name
    folder.mkdir()
    chosen = ["+exec=isoexec", "trainer.resume_mode=from_path", f"trainer.resume_path={folder}"]
    _, cfg = compose(chosen)
    with pytest.raises(ValueError, match="is no checkpoint: it is not named global_step_NUMBER, or has no trainer_sta"):
        ranges.resume(cfg)
    (folder / "trainer_state.pt").touch()
    if name == "global_step_3":
        ranges.resume(cfg)
    else:
        with pytest.raises(ValueError, match="is no checkpoint"):
            ranges.resume(cfg)


def test_pages_counted_by_hand_hold_one_sequence() -> None:
    """64 tokens are 4 pages of 16, and one page is nobody's."""
    for pages, refused in ((4, True), (5, False)):
        launch, cfg = compose(["+exec=isoexec", f"+{ENGINE}.engine_init_kwargs.num_gpu_blocks_override={pages}"])
        config = model.planned(launch)
        assert config.max_position == 64
        if refused:
            with pytest.raises(ValueError, match="num_gpu_blocks_override=4 is less than the 5 pages of 16 tokens"):
                model.cache(cfg, config, launch)
        else:
            model.cache(cfg, config, launch)


GPU = ["+exec=isoexec", "runtime=cuda", "kernels=sm90", "model.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (
            "kernels.kv_block=48 kernels.kv_partition=480 runtime.page_size=96",
            "attention: the sm90 implementation has no kv_block 48",
        ),
        ("model.shape.head_dim=12", "attention: the sm90 implementation has no head of 12 in groups of 2"),
        ("model.shape.head_dim=512", "attention: the sm90 implementation has no head of 512 in groups of 2"),
    ],
)
def test_heads_and_blocks_that_a_gpu_does_not_have(override: str, named: str) -> None:
    pytest.importorskip("triton")
    launch, _ = compose(GPU)
    model.widths(model.planned(launch), launch)
    launch, _ = compose([*GPU, *override.split()])
    with pytest.raises(ValueError, match=re.escape(f"kernels.impl=kernel: {named}")):
        model.widths(model.planned(launch), launch)


def test_recurrent_layers_in_the_second_runner() -> None:
    """vLLM's second runner has no pages of states; a CPU has only the first."""
    launch, _ = compose([*GPU, "runtime.runner=2"])
    model.runner(model.planned(launch), launch)
    launch, _ = compose([*GPU, "runtime.runner=2", "model=tiny_hybrid"])
    with pytest.raises(ValueError, match="runtime.runner=2 has no pages of states.*qwen3_5 need; set runtime.runner=1"):
        model.runner(model.planned(launch), launch)
    launch, _ = compose([*GPU[1:], "+exec=native", "runtime.runner=2"])
    with pytest.raises(ValueError, match="runtime.runner=2 is of our model's engine; with exec=native vLLM chooses"):
        model.runner(model.planned(launch), launch)
    with pytest.raises(ValueError, match="runtime.runner=2 needs runtime.device=cuda; leave it out"):
        compose(["+exec=isoexec", "runtime.runner=2"])
    with pytest.raises(ValueError, match="runtime.runner=3 is none of vLLM's model runners; set it to 1 or 2"):
        compose([*GPU, "runtime.runner=3"])


def test_latent_widths_that_a_gpu_does_not_have() -> None:
    pytest.importorskip("triton")
    launch, _ = compose([*GPU, "model=tiny_mla"])
    config = model.planned(launch)
    model.widths(config, launch)
    with pytest.raises(ValueError, match="kernels.impl=kernel: mla: the sm90 implementation has no keys of 1024"):
        model.widths(dataclasses.replace(config, kv_lora_rank=1024), launch)


def test_a_contract_that_cannot_be_is_refused_before_a_base_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(*_: object) -> None:
        raise AssertionError("a base checkpoint was trained")

    def stale(*_: object) -> None:
        raise GateError("gate: region rope, arch cpu: the record is stale")

    monkeypatch.setattr(sequence, "prepare_checkpoint", trained)
    monkeypatch.setattr(sequence, "compose_contract", stale)
    with pytest.raises(GateError, match="region rope"):
        check(*compose(["+exec=isoexec", *TINY]))


def test_a_failure_of_dynamic_sampling_names_a_mend() -> None:
    said = "Exiting training loop due to hitting dynamic sampling limit for filter strategy with 30 max sample batches."
    assert "set trainer.algorithm.dynamic_sampling.type=null, as run=random_weights does" in launcher.cause(
        RuntimeError(said)
    )
    assert launcher.cause(RuntimeError("another")) == "RuntimeError: another"
