"""Values that no run can have are refused, by name, before anything is started."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_isoexec.launch import preflight
from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.folder import claim


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
        claim(tmp_path / "file" / "run", resume=False)
