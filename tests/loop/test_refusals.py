"""Bad input: one line that names the cause and the mend, an exit status, soon, and nothing left running."""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.preflight import Refusal, machine, model
from skyrl_isoexec.launch.task import prepare_checkpoint
from skyrl_isoexec.launch.watch import Watch

WITHIN = 60
"""Seconds from a fault to the end of the run."""
VALID = ("+exec=isoexec", "run=short", "model=checkpoint", "model.dtype=float32")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the embedded task, hardly trained."""
    folder = tmp_path_factory.mktemp("base")
    shape = "model.shape={hidden_size: 32, intermediate_size: 32, num_layers: 1}"
    quick = ["task.base.steps=2", "task.base.warmup_steps=1", "task.base.batch_size=4", shape]
    launch, _ = compose(["+exec=isoexec", *quick, f"task.cache_dir={folder}", f"run_dir={folder / 'run'}"])
    return prepare_checkpoint(launch, progress=lambda text: None)


@pytest.fixture
def checkpoint(base: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be spoilt."""
    return Path(shutil.copytree(base, tmp_path / "checkpoint"))


def spoil(folder: Path, change: Callable[[dict], None]) -> None:
    """Write the checkpoint's tensors again, changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def cut_first_layer(tensors: dict) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1]


def drop_norm(tensors: dict) -> None:
    del tensors["model.norm.weight"]


def lower_vocabulary(folder: Path) -> None:
    """A model of fifteen tokens under a tokenizer of sixteen."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 15}))
    spoil(folder, lambda t: t.update({k: v[:15] for k, v in t.items() if "embed" in k or "lm_head" in k}))


def spoilt(kind: str, folder: Path) -> tuple[str, ...]:
    """Spoil the checkpoint; the words that its refusal has to contain."""
    if kind == "shape":
        spoil(folder, cut_first_layer)
        return ("model.layers.0.mlp.up_proj.weight has shape (31, 32)", "gives (32, 32)", "mend the checkpoint")
    if kind == "missing":
        spoil(folder, drop_norm)
        return ("model.norm.weight is missing", "mend the checkpoint")
    lower_vocabulary(folder)
    return ("the tokenizer in", "has 16 tokens", "vocab_size is 15", "give the tokenizer that belongs")


def launched(folder: Path, *arguments: str) -> tuple[int, str]:
    """(exit status, standard error's line that says what is wrong) of the product's command, which leaves no folder."""
    command = [sys.executable, "-m", "skyrl.train", *arguments, f"run_dir={folder}"]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=WITHIN)
    said = [line for line in done.stderr.splitlines() if line.startswith(("refused: ", "failed: "))]
    assert len(said) == 1 and "Traceback" not in done.stderr, done.stderr
    assert not folder.exists()
    return done.returncode, said[0]


@pytest.mark.parametrize("kind", ["shape", "missing", "vocabulary"])
def test_spoilt_checkpoint_is_refused(kind: str, checkpoint: Path) -> None:
    words = spoilt(kind, checkpoint)
    with pytest.raises(Refusal) as refusal:
        model.tokenizer(checkpoint, model.checkpoint(checkpoint, dtype="float32"))
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shape", "missing", "vocabulary"])
def test_command_refuses_spoilt_checkpoint(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    words = spoilt(kind, checkpoint)
    status, said = launched(tmp_path / "run", *VALID, f"model.path={checkpoint}")
    assert status == 2
    assert all(word in said for word in words), said


def test_good_checkpoint_passes(base: Path) -> None:
    assert len(model.tokenizer(base, model.checkpoint(base, dtype="float32"))) == 16


@pytest.mark.slow
def test_command_refuses_prompt_longer_than_allowed(base: Path, tmp_path: Path) -> None:
    rows = []
    for prompt in ("1+1=", "1+2=", "11111+22222=", *(f"{a}+1=" for a in range(20))):
        row = {"prompt": [{"role": "user", "content": prompt}], "reward_spec": {"ground_truth": "0"}}
        rows.append(json.dumps({"data_source": "addition", "env_class": "addition", **row}) + "\n")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(rows))
    status, said = launched(tmp_path / "run", *VALID, f"model.path={base}", f"data.train_data=[{data}]")
    assert status == 2
    assert f"1 of 23 prompts in {data} are longer than trainer.max_prompt_length = 8 tokens" in said
    assert "raise it" in said


def test_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        number = other.getsockname()[1]
        with pytest.raises(Refusal, match=rf"router.port={number}: the port is in use .*; choose a free one"):
            machine.port(number, "router.port")
    machine.port(number, "router.port")
    machine.port(None, "router.port")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["port", "prometheus_port"])
def test_command_refuses_port_in_use(name: str, base: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen(1)
        number = other.getsockname()[1]
        key = f"generator.inference_engine.router_init_kwargs.{name}"
        status, said = launched(tmp_path / "run", *VALID, f"model.path={base}", f"++{key}={number}")
    assert status == 2
    assert f"{key}={number}: the port is in use" in said and "choose a free one" in said


def test_watch_names_a_dead_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        watch = Watch([])
        watch.add({"the trainer's rank 0": child.pid})
        assert watch.look() is None
        child.kill()
        child.wait()
        assert watch.look() == f"the trainer's rank 0 (process {child.pid}) died"


def test_watch_names_a_silent_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert f"the inference server at {url} does not answer" in Watch([url]).look()


def test_lengths_that_do_not_fit(base: Path) -> None:
    _, cfg = compose([*VALID, f"model.path={base}", "trainer.max_prompt_length=60"])
    cfg.generator.sampling_params.max_generate_length = 20
    with pytest.raises(Refusal, match="= 80 is more than the model's max_position_embeddings = 64; lower"):
        model.lengths(cfg, model.checkpoint(base, dtype="float32"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_engine_ends_the_run(tmp_path: Path, start: Callable[..., object]) -> None:
    folder = tmp_path / "run"
    with start(folder, "+exec=isoexec", "run=short", "trainer.max_training_steps=200") as run:
        run.until(lambda: 1 in run.steps)
        engines = run.named("EngineCore")
        assert engines, run.tail()
        killed(engines[0])
        before = time.monotonic()
        status = run.wait(WITHIN)
        left = run.left_over()
    print(f"ended {time.monotonic() - before:.1f} s after the fault: {said(run)}")
    assert status == 1, run.tail()
    assert "the inference server at http://" in said(run) and "trainer.resume_mode=latest" in said(run)
    assert not left, left


def killed(process: psutil.Process) -> None:
    """Kill as the kernel does when memory runs out."""
    process.kill()


def said(run: object) -> str:
    """The one line of the failure."""
    lines = [line for line in run.errors.splitlines() if line.startswith("failed: ")]
    assert len(lines) == 1 and "Traceback" not in run.errors, run.tail()
    return lines[0]
