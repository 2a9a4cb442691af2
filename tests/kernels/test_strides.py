"""Where kernels on Hopper read rows that lie apart: addresses, against those of the tensor itself."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from skyrl_isoexec.kernels.numeric.sm90_strides import rows_apart, whole_tokens  # noqa: E402

WHOLE = torch.arange(5 * 96, dtype=torch.int64).view(5, 96)
VIEWS: dict[str, Tensor] = {
    "contiguous": WHOLE,
    "a part of rows": WHOLE[:, 16:40],
    "heads of a part": WHOLE[:, 16:64].unflatten(1, (3, 16)),
    "parts of heads": WHOLE.unflatten(1, (6, 16))[:, :, 4:12],
    "one head": WHOLE[:, 16:40][:, None],
    "one token": WHOLE[:1, 16:64].unflatten(1, (3, 16)),
    "one token's part": WHOLE[3:4, 7:30],
    "no token": WHOLE[:0, 16:40],
    "turned": WHOLE.T,
    "heads turned": WHOLE.unflatten(1, (6, 16)).transpose(1, 2),
    "some heads": WHOLE.unflatten(1, (6, 16))[:, ::2],
    "expanded": WHOLE[:, None, :16].expand(5, 4, 16),
}


@pytest.mark.parametrize("name", VIEWS)
def test_rows_lie_where_they_are_said_to(name: str) -> None:
    """Row r begins at r // N * stride + r % N * step of what is given back, and has the numbers of the view."""
    view = VIEWS[name]
    given, heads, stride, step = rows_apart(view)
    flat = given.as_strided((given.untyped_storage().size() // 8 - given.storage_offset(),), (1,))
    rows = view.reshape(-1, view.shape[-1])
    found = [flat[r // heads * stride + r % heads * step :][: view.shape[-1]] for r in range(len(rows))]
    assert len(found) == len(rows) and all(torch.equal(a, b) for a, b in zip(found, rows, strict=True))


def test_what_is_copied() -> None:
    """Only rows that are in pieces."""
    copied = {
        name for name, view in VIEWS.items() if view.numel() and rows_apart(view)[0].data_ptr() != view.data_ptr()
    }
    assert copied == {"turned", "heads turned"}


@pytest.mark.parametrize("name", [name for name, view in VIEWS.items() if view.dim() == 3])
def test_tokens_in_one_piece(name: str) -> None:
    """Heads lie end to end, tokens stride(0) apart."""
    view = VIEWS[name]
    given = whole_tokens(view)
    flat = given.as_strided((given.untyped_storage().size() // 8 - given.storage_offset(),), (1,))
    size = view.shape[1] * view.shape[2]
    for token, row in enumerate(view.flatten(1)):
        assert torch.equal(flat[token * given.stride(0) :][:size], row)
    kept = {"heads of a part", "one head", "one token"}
    assert (given.data_ptr() == view.data_ptr()) == (name in kept)
