"""A command line becomes the two configurations of a run, or is refused with the name that was meant."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_isoexec.launch.compose import CONFIGS, compose, compose_or_exit, resolved
from skyrl_isoexec.launch.overrides import groups_of
from skyrl_isoexec.launch.schema import ConfigError

EXEC = "+exec=isoexec"
MEGATRON = "trainer.policy.megatron_config"
TRAINER_TP = "trainer.policy.megatron_config.tensor_model_parallel_size"
ENGINE_KWARGS = "generator.inference_engine.engine_init_kwargs"


NEEDED = {
    ("model", "checkpoint"): ["model.path=folder"],
    ("kernels", "sm90"): ["runtime=cuda", "model.dtype=bfloat16"],
    ("runtime", "cuda"): ["model.dtype=bfloat16"],
    ("run", "random_weights"): ["model.path=folder"],
}


def needed(group: str, option: str) -> list[str]:
    """What an option cannot do without."""
    return NEEDED.get((group, option), [])


OPTIONS = [(group, option) for group, options in groups_of(CONFIGS).items() for option in options]


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=lambda value: value)
def test_every_option_of_every_group_composes(group: str, option: str) -> None:
    arguments = [f"{group}={option}", *needed(group, option)]
    launch, skyrl = compose(arguments if group == "exec" else [EXEC, *arguments])
    assert launch.exec.name == (option if group == "exec" else "isoexec")
    assert skyrl.trainer.placement.colocate_all == launch.topology.colocate


@pytest.mark.parametrize("arm", ["isoexec", "native"])
def test_the_default_is_dapo_on_the_embedded_task(arm: str, tmp_path: Path) -> None:
    launch, skyrl = compose([f"+exec={arm}", f"run_dir={tmp_path / 'demo'}"])
    trainer, generator = skyrl.trainer, skyrl.generator
    assert (launch.exec.name, launch.model.dtype, launch.schedule.num_leaves) == (arm, "float32", 1)
    assert (trainer.algorithm.advantage_estimator, trainer.algorithm.use_kl_loss) == ("grpo", False)
    assert (trainer.algorithm.eps_clip_low, trainer.algorithm.eps_clip_high) == (0.2, 0.28)
    assert trainer.algorithm.dynamic_sampling.type == "filter" and generator.apply_overlong_filtering
    assert trainer.max_training_steps == 20
    assert not trainer.bf16 and generator.inference_engine.model_dtype == "float32"
    assert skyrl.data.train_data == [str(tmp_path / "demo" / "data" / "train.jsonl")]
    assert trainer.run_name == launch.run.name == "demo"
    assert not (tmp_path / "demo").exists(), "composing creates nothing"


def test_skyrl_accepts_the_default() -> None:
    from skyrl.train.utils.utils import validate_batch_sizes, validate_cfg

    for arm, topology in itertools.product(("isoexec", "native"), groups_of(CONFIGS)["topology"]):
        if arm == "isoexec" or not topology.startswith("trainer_"):
            _, skyrl = compose([f"+exec={arm}", f"topology={topology}"])
            validate_batch_sizes(skyrl)
            validate_cfg(skyrl)


def test_skyrl_keys_keep_their_names() -> None:
    lr, temperature = "trainer.policy.optimizer_config.lr=1e-4", "generator.sampling_params.temperature=0.7"
    _, skyrl = compose([EXEC, lr, temperature, f"{ENGINE_KWARGS}.max_model_len=32", "data.train_data=[a.jsonl]"])
    assert skyrl.trainer.policy.optimizer_config.lr == 1e-4
    assert skyrl.generator.sampling_params.temperature == skyrl.trainer.algorithm.temperature == 0.7
    assert skyrl.generator.inference_engine.engine_init_kwargs["max_model_len"] == 32
    assert skyrl.data.train_data == ["a.jsonl"]


def test_either_name_of_a_setting_sets_both() -> None:
    ours = compose([EXEC, "topology.trainer.tp=2", "model.dtype=bfloat16"])
    theirs = compose([EXEC, f"{TRAINER_TP}=2", "trainer.bf16=true"])
    for launch, skyrl in (ours, theirs):
        assert launch.topology.trainer.tp == skyrl.trainer.policy.megatron_config.tensor_model_parallel_size == 2
        assert skyrl.trainer.ref.megatron_config.tensor_model_parallel_size == 2
        assert launch.model.dtype == skyrl.generator.inference_engine.model_dtype == "bfloat16"
        assert skyrl.trainer.policy.megatron_config.optimizer_config_kwargs["params_dtype"] == "bfloat16"
        assert (launch.topology.engine.num, launch.schedule.num_leaves) == (2, 2)
        assert skyrl.trainer.placement.policy_num_gpus_per_node == 2


@pytest.mark.parametrize(
    ("arguments", "trainer_ranks", "engines"),
    [
        (["topology.engine.tp=4"], 4, 1),
        (["topology.trainer.tp=2", "topology.engine.tp=4"], 4, 1),
        (["topology.trainer.tp=2", "topology.trainer.dp=2"], 4, 4),
        (["topology.engine.num=3"], 3, 3),
        (["topology.trainer.ep=4"], 4, 4),
        (["topology.trainer.ep=4", "topology.trainer.tp=2", "topology.engine.tp=4"], 4, 1),
        (["topology.trainer.ep=2", "topology.trainer.tp=2", "topology.trainer.pp=2"], 4, 4),
        (["topology.trainer.ep=2", "topology.trainer.pp=2", "topology.colocate=false"], 4, 1),
        (["topology=trainer_ep2"], 2, 2),
        (["topology.colocate=false", "topology.engine.tp=2"], 1, 1),
        (["trainer.placement.policy_num_gpus_per_node=2"], 2, 2),
    ],
)
def test_counts_follow_from_degrees(arguments: list[str], trainer_ranks: int, engines: int) -> None:
    launch, skyrl = compose([EXEC, *arguments])
    assert skyrl.trainer.placement.policy_num_gpus_per_node == trainer_ranks
    assert skyrl.generator.inference_engine.num_engines == launch.topology.engine.num == engines


REFUSED = {
    "exec=isoexce": "did you mean 'isoexec'?",
    "topolgy=single": "did you mean 'topology'?",
    "topology=trainer_tp": "did you mean 'trainer_tp2'?",
    "topology.trainer.tpp=2": "did you mean 'topology.trainer.tp'?",
    "topology={trainer: {tpp: 2}}": "did you mean 'topology.trainer.tp'?",
    "+kernels.num_leafs=2": "did you mean 'kernels.num_leaves'?",
    "model.shape.hiden_size=64": "did you mean 'model.shape.hidden_size'?",
    "task.base.step=3": "did you mean 'task.base.steps'?",
    "runtime.page_sizes=16": "did you mean 'runtime.page_size'?",
    "run.nam=x": "did you mean 'run.name'?",
    "rundir=x": "did you mean 'run_dir'?",
    "++trainer.polcy.optimizer_config.lr=1": "did you mean 'trainer.policy'?",
    "optimizer_config.lr=1": "'trainer.policy.optimizer_config.lr'",
    "generator.sampling_params.temprature=1": "did you mean 'generator.sampling_params.temperature'?",
    "data.dataloader.workers=1": "did you mean 'data.dataloader.num_workers'?",
    "environment.env_clas=x": "did you mean 'environment.env_class'?",
    f"{ENGINE_KWARGS}.blok_size=16": f"did you mean '{ENGINE_KWARGS}.block_size'?",
    "trainer.policy.megatron_config.transformer_config_kwargs.recompute_granularty=full": "recompute_granularity'?",
    "trainer.policy.megatron_config.optimizer_config_kwargs.adam_beta_1=0.9": "adam_beta1'?",
    "trainer.algorithm.eps_clip_low.x=1": "holds a value",
    "trainer.seed=abc": "trainer.seed='abc': expected int",
    "trainer.bf16=1": "trainer.bf16=1: expected bool",
    "trainer.policy.optimizer_config.lr=high": "expected float",
    "data.train_data=a.jsonl": "expected list of str",
    "kernels.impl=gpu": "expected 'cpu' or 'reference' or 'kernel'",
    "kernels.impl=kernel": "kernels.impl=kernel does not compute on runtime.device=cpu",
    "kernels=sm90": "does not compute on runtime.device=cpu; choose kernels=cpu, or runtime=cuda",
    "runtime=cuda": "model.dtype=float32 with kernels.impl=kernel: a GPU has no exact fp32 product; set model.dtype=",
    "runtime.transport=device": "needs runtime.device=cuda; set runtime.transport=gloo, or choose runtime=cuda",
    "run=random_weights": "name a checkpoint folder with model.path=FOLDER",
    "model.shape.num_layers=0": "model.shape.num_layers 0 is not positive",
    "task.base.batch_size=0": "task.base.batch_size 0 is not positive",
    "model.dtype=float16": "did you mean 'bfloat16'?",
    "kernels.kv_partition=100": "kernels.kv_partition 100 is not a multiple of kernels.kv_block 16",
    "runtime.page_size=24": "runtime.page_size 24 is not a multiple of kernels.kv_block 16; set it to one, such as 32",
    "topology.trainer.tp=3": "topology.trainer.tp 3 is not a power of two",
    "topology.trainer.ep=0": "topology.trainer.ep 0 is not positive",
    f"{MEGATRON}.expert_tensor_parallel_size=2": "expert_tensor_parallel_size=2 is not supported here: it has to be 1",
    "trainer.seed=1,2": "a sweep",
    "=5": "no key before '='",
    "run.name=../../z": "run.name '../../z' is not one name of a folder",
    "run.name=..": "run.name '..' is not one name",
    "run.name=": "run.name is given an empty text",
    "run_dir=''": "run_dir is given an empty text",
    'run_dir="~nobody-has-this-name/x"': "no such home folder",
    'data.train_data=["~nobody-has-this-name/x.jsonl"]': "no such home folder",
    "data.train_data=['']": "data.train_data is given an empty text",
    "trainer.policy.optimizer_config.lr=nan": "lr=nan is not a finite number",
    "trainer.placement.policy_num_nodes=0": "policy_num_nodes=0 is not positive",
    "trainer.placement.policy_num_gpus_per_node=-1": "policy_num_gpus_per_node=-1 is not positive",
    "model.shape.rope_theta=0": "model.shape.rope_theta 0 is not positive",
    "task.base.seed=-1": "task.base.seed -1",
    "task.base.warmup_steps=-1": "warmup_steps -1 is negative",
    f"+{ENGINE_KWARGS}.tensor_parallel_size=2": "set topology.engine.tp instead",
    f"+{ENGINE_KWARGS}.speculative_config={{method: ngram}}": "has a key of its own",
    "generator.inference_engine.enable_chunked_prefill=false": "has to be True",
    "generator.batched=true": "has to be False",
    "+trainer.policy.megatron_config.transformer_config_kwargs.num_layers=7": "follows from the checkpoint",
    "+trainer.policy.megatron_config.optimizer_config_kwargs.lr=-1": "set trainer.policy.optimizer_config.lr instead",
    "task.base.lr=1e30": "task.base.lr 1e+30 is not in (0, 1]",
    "kernels.kv_partition=1048592": "kernels.kv_partition 1048592 is above",
    "~trainer.seed": "cannot be deleted",
    "--cfg": "there are no flags",
    "trainer.seed": "not KEY=VALUE",
    "trainer.strategy=fsdp": "has to be megatron",
    "trainer.policy.megatron_config.context_parallel_size=2": "has to be 1",
}


@pytest.mark.parametrize("argument", REFUSED, ids=str)
def test_refused_with_what_was_meant(argument: str) -> None:
    arguments = [argument] if argument.startswith("exec=") else [EXEC, argument]
    with pytest.raises(ConfigError) as refusal:
        compose(arguments)
    assert REFUSED[argument] in str(refusal.value)


CONTRADICTIONS = [
    (["topology.trainer.tp=2", f"{TRAINER_TP}=4"], ["topology.trainer.tp=2", f"{TRAINER_TP}=4"]),
    (["trainer.bf16=true", "model.dtype=float32"], ["trainer.bf16=True", "model.dtype=float32"]),
    (["trainer.bf16=true", "generator.inference_engine.model_dtype=float32"], ["trainer.bf16", "model_dtype=float32"]),
    (["topology.engine.tp=2", "topology.trainer.dp=1"], ["topology.trainer", "topology.engine", "colocate"]),
    (["kernels.num_leaves=1", "topology.engine.tp=2"], ["kernels.num_leaves 1", "degree 2"]),
    (["topology.trainer.ep=2", f"{MEGATRON}.expert_model_parallel_size=4"], ["topology.trainer.ep=2", "size=4"]),
    (["topology.trainer.ep=4", "topology.trainer.dp=2"], ["topology.trainer.ep=4", "2 ranks", "1 x 2", "lower it"]),
    (["topology.trainer.ep=8", "topology.trainer.tp=2", "topology.engine.num=4"], ["ep=8", "4 ranks of a stage"]),
    (["topology.trainer.dp=4", "trainer.placement.policy_num_gpus_per_node=2"], ["topology.trainer.dp=4", "node=2"]),
]


@pytest.mark.parametrize(("arguments", "named"), CONTRADICTIONS)
def test_contradictions_name_both_sides(arguments: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose([EXEC, *arguments])
    assert all(name in str(refusal.value) for name in named), refusal.value


@pytest.mark.parametrize("model", groups_of(CONFIGS)["model"])
def test_random_weights_are_of_no_model_by_itself(model: str) -> None:
    """Neither the checkpoint that an option of `model` names nor the one that is trained here."""
    with pytest.raises(ConfigError, match="model.path is null"):
        compose([EXEC, f"model={model}", "run=random_weights"])
    launch, _ = compose([EXEC, f"model={model}", "run=random_weights", "model.path=folder"])
    assert launch.model.path == "folder"


def test_a_device_is_refused_before_what_contradicts_it() -> None:
    def present(device: str) -> None:
        raise ValueError(f"no {device} here")

    with pytest.raises(ValueError, match="no cuda here"):
        compose([EXEC, "runtime=cuda", "kernels=sm90"], present=present)
    with pytest.raises(ConfigError, match="sed"):
        compose([EXEC, "runtime=cuda", "trainer.sed=1"], present=present)


def test_the_same_value_under_both_names_is_no_contradiction() -> None:
    launch, _ = compose([EXEC, "topology.trainer.tp=2", f"{TRAINER_TP}=2"])
    assert launch.topology.trainer.tp == 2


def test_paths_that_exist_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    launch, skyrl = compose([EXEC, "model.path=folder", "data.train_data=[train.jsonl, some/name]", "run_dir=here"])
    assert launch.model.path == skyrl.trainer.policy.model.path == str(tmp_path / "folder")
    assert skyrl.data.train_data == [str(tmp_path / "train.jsonl"), "some/name"]
    assert launch.run_dir == tmp_path / "here"


def test_folders_that_are_written_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, skyrl = compose([EXEC, "trainer.ckpt_path=kept", "trainer.export_path=s3://bucket/x"])
    assert skyrl.trainer.ckpt_path == str(tmp_path / "kept")
    assert skyrl.trainer.export_path == "s3://bucket/x"


def test_the_last_assignment_holds() -> None:
    launch, skyrl = compose([EXEC, "trainer.seed=1", "topology=engine_tp2", "trainer.seed=2", "topology=single"])
    assert (skyrl.trainer.seed, launch.topology.engine.tp) == (2, 1)


def test_no_stack_chosen() -> None:
    with pytest.raises(ConfigError, match="add \\+exec=isoexec"):
        compose([])


def test_native_trainer_has_degree_one() -> None:
    with pytest.raises(ConfigError, match="topology.trainer.tp=2 with exec=native"):
        compose(["+exec=native", "topology.trainer.tp=2"])


def test_refusal_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compose_or_exit([EXEC, "trainer.sed=1"])
    assert ended.value.code == 2
    assert "did you mean 'trainer.seed'?" in capsys.readouterr().err


def test_a_refusal_imports_no_runtime(root: Path) -> None:
    """A misspelled key is refused at once: neither torch nor a host is imported for it."""
    program = (
        "import sys\nfrom skyrl_isoexec.launch.compose import ConfigError, compose\n"
        "try:\n    compose(['+exec=isoexec', 'trainer.sed=1'])\nexcept ConfigError:\n"
        "    print([m for m in ('torch', 'ray', 'vllm', 'megatron', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_resolved_is_plain_data() -> None:
    from omegaconf import OmegaConf

    launch, skyrl = compose([EXEC])
    text = OmegaConf.to_yaml(OmegaConf.create(resolved(launch, skyrl)))
    assert "num_leaves: 1" in text and "train_batch_size: 32" in text


def test_smollm2_on_a_gpu() -> None:
    launch, skyrl = compose([EXEC, "runtime=cuda", "kernels=sm90", "run=smollm2_arithmetic"])
    assert (launch.kernels.impl, launch.model.dtype, launch.runtime.transport) == ("kernel", "bfloat16", "device")
    assert (launch.schedule.kv_block, launch.schedule.kv_partition, launch.runtime.page_size) == (64, 512, 64)
    engine = skyrl.generator.inference_engine
    assert not engine.enforce_eager and engine.enable_prefix_caching and engine.engine_init_kwargs["block_size"] == 64
    assert skyrl.environment.env_class == "arithmetic" and skyrl.generator.max_input_length == 64
    assert skyrl.data.train_data == [str(launch.run_dir / "data" / "train.jsonl")]


def test_smollm2_on_files_of_a_user() -> None:
    arguments = [EXEC, "runtime=cuda", "run=smollm2_gsm8k"]
    assert compose([*arguments, "data.train_data=[mine.jsonl]"])[1].data.train_data == ["mine.jsonl"]
    assert compose(arguments)[1].data.train_data == [], "the preflight refuses it"
