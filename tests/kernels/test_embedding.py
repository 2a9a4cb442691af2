"""What an embedding refuses and differentiates; its bits are proved by its gate."""

import pytest
import torch

from skyrl_isoexec.kernels.embedding import cpu, reference
from skyrl_isoexec.kernels.embedding.cases import cases


def test_backward(dtype, check_backward):
    ids, w = cases(dtype)["repeated"]
    ours, theirs = (lambda w, op=op: op(ids, w.float()).to(dtype) for op in (cpu.embedding, reference.embedding))
    check_backward(ours, theirs, w)
    check_backward(lambda w: cpu.embedding(ids.int(), w), lambda w: reference.embedding(ids, w), w)


@pytest.mark.parametrize("wrong", [-1, 11])
@pytest.mark.parametrize("implementation", [cpu, reference])
def test_an_id_outside_the_table_is_refused(wrong, implementation):
    with pytest.raises(IndexError):
        implementation.embedding(torch.tensor([0, wrong]), torch.ones(11, 2))
    with pytest.raises(IndexError):
        implementation.embedding(torch.tensor([0, wrong]), torch.ones(11, 2, requires_grad=True))


def test_refusals():
    with pytest.raises(ValueError, match="not \\[T\\]"):
        cpu.embedding(torch.ones(2, 2).long(), torch.ones(3, 2))
    with pytest.raises(TypeError, match="int64"):
        cpu.embedding(torch.ones(2), torch.ones(3, 2))
