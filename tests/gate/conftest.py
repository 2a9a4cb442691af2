"""What the tests of gates share: one thread, a folder of records, a proof that stops early."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from skyrl_isoexec.kernels.numeric.proof import Proof


class Difference(Exception):
    """Two results that a gate compared differ."""


class StoppingProof(Proof):
    """Stops at the first difference."""

    def equal(self, name, expected, found, at=""):
        super().equal(name, expected, found, at)
        if self.failures:
            raise Difference(self.failures[0])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Gates run on one thread of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """An empty folder of records."""
    return tmp_path / "records"


@pytest.fixture
def stopping() -> StoppingProof:
    return StoppingProof()


@pytest.fixture
def difference() -> type[Difference]:
    return Difference
