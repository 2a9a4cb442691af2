"""Values that no run can have are refused, by name, before anything is started."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_isoexec.launch import preflight
from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.folder import claim
from skyrl_isoexec.launch.main import main


@pytest.mark.parametrize("key", ["train_batch_size", "policy_mini_batch_size", "max_training_steps"])
def test_counts_that_are_not_positive(key: str) -> None:
    _, cfg = compose(["+exec=isoexec", f"trainer.{key}=0"])
    with pytest.raises(preflight.Refusal, match=f"trainer.{key}=0 is not positive"):
        preflight.updates(cfg)


@pytest.mark.parametrize(("files", "named"), [([], r"train_data=\[\]"), (["/no.jsonl"], "/no.jsonl, which does not")])
def test_missing_data(files: list[str], named: str) -> None:
    with pytest.raises(preflight.Refusal, match=named):
        preflight.data(SimpleNamespace(data=SimpleNamespace(train_data=files)))


def test_a_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be made"):
        claim(tmp_path / "file" / "run", checkpoints=None)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.resume_mode=foo", "trainer.resume_mode=foo"),
        ("trainer.resume_mode=from_path", "trainer.resume_path"),
        ("kernels.kv_block=8", "kv_block 8"),
        ("trainer.train_batch_size=33", "SkyRL refuses"),
        ("generator.sampling_params.top_p=0.9", "top_p=0.9"),
        ("generator.sampling_params.temperature=0", "temperature=0"),
        ("exec.name=native", "exec.name=native contradicts exec=isoexec"),
    ],
)
def test_refused_before_anything_is_left(
    override: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command line: code 2, one line, and not even a folder."""
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["+exec=isoexec", override, f"run_dir={folder}"])
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and named in lines[0]
    assert not folder.exists()


def test_help_beside_a_stack(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["+exec=isoexec", "--help"])
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().err
