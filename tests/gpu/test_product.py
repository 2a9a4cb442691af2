"""A row of a product has the same bits under every tile, beside any rows, on any number of ranks, and in a graph."""

import pytest
import torch

from skyrl_isoexec.kernels.numeric.bound import product_bound

ROWS = (1, 2, 17, 33, 64, 128, 257, 1024)
SHAPES = ((2048, 2048), (4096, 12288), (12288, 4096), (576, 960), (77, 200))
"""(N, K); the last ones have a head of SmolLM2's width, and sizes that no tile divides."""


def every_tile(table, n, k, leaves):
    """Each tile of a table that suits a shape, once."""
    tiles = {tile for rows in table.shapes.values() for _last, tiles in rows for tile in tiles}
    return sorted((t for t in tiles if t.suits(n, k, leaves, k % 8 == 0)), key=str)


@pytest.mark.parametrize("n, k", SHAPES)
def test_linear_rows_keep_their_bits(n, k, op, normal, differing):
    kernel = op("linear")
    w, bias, anchor = normal(n, k, seed=1, scale=k**-0.5), normal(n, seed=2), normal(1, k, seed=3)
    for with_bias, dtype in ((None, torch.float32), (None, torch.bfloat16), (bias, torch.bfloat16)):
        alone = kernel.linear(anchor, w, with_bias, dtype)
        for m in ROWS:
            for place in {0, m // 2, m - 1}:
                x = normal(m, k, seed=4)
                x[place] = anchor
                assert differing(kernel.linear(x, w, with_bias, dtype)[place : place + 1], alone) == 0, (m, place)


@pytest.mark.parametrize("n, k", SHAPES)
def test_linear_tiles_agree_and_hold_a_bound(n, k, op, normal, differing):
    kernel, x, w = op("linear"), normal(300, k, seed=1), normal(n, k, seed=2, scale=k**-0.5)
    tiles = every_tile(kernel.TABLE, n, k, 1)
    first = kernel.forward(x, w, None, torch.float32, tiles[0])
    exact, bound = product_bound(x, w)
    assert ((first - exact).abs() <= bound).all(), ((first - exact).abs() / bound).max().item()
    for tile in tiles:
        for m in (1, 16, 64, 300):
            assert differing(kernel.forward(x[:m], w, None, torch.float32, tile), first[:m]) == 0, (str(tile), m)


@pytest.mark.parametrize("leaves", [1, 2, 8])
@pytest.mark.parametrize("n, k", [(2048, 2048), (4096, 12288), (576, 1536)])
def test_row_linear_tiles_rows_and_degrees_agree(n, k, leaves, op, normal, differing):
    kernel, x, w = op("row_linear"), normal(257, k, seed=1), normal(n, k, seed=2, scale=k**-0.5)
    tiles = every_tile(kernel.TABLE, n, k, leaves)
    root = kernel.forward(x, w, leaves, tiles[0])
    halves = zip(x.chunk(leaves, 1), w.chunk(leaves, 1), strict=True)
    parts = [op("linear").linear(a, b, None, torch.float32) for a, b in halves]
    assert differing(op("row_linear", "reference").tree_sum(torch.stack(parts)), root) == 0
    for tile in tiles:
        for m in (1, 64, 257):
            assert differing(kernel.forward(x[:m], w, leaves, tile), root[:m]) == 0, (str(tile), m)
    for m in ROWS[:-1]:
        assert differing(kernel.row_linear(x[:m], w, leaves), root[:m]) == 0, m
    for degree in (d for d in (1, 2, 4, 8) if d <= leaves):
        nodes = [
            kernel.row_linear(a, b, leaves // degree)
            for a, b in zip(x.chunk(degree, 1), w.chunk(degree, 1), strict=True)
        ]
        assert differing(kernel.tree_sum(torch.stack(nodes)), root) == 0, degree
        columns = [kernel.row_linear(x, b, leaves) for b in w.chunk(degree, 0)]
        assert differing(torch.cat(columns, 1), root) == 0, degree


def test_graph_and_repeats(op, normal, differing, replayed):
    x, w = normal(33, 4096, seed=1), normal(4096, 4096, seed=2)
    for run in (lambda: op("linear").linear(x, w), lambda: op("row_linear").row_linear(x, w, 4)):
        first = run()
        assert differing(replayed(run), first) == 0
        assert all(torch.equal(run(), first) for _ in range(200))


def test_backward_repeats_and_holds_a_bound(op, normal):
    x, w, bias = normal(512, 1024, seed=1), normal(768, 1024, seed=2), normal(768, seed=3)
    dy = normal(512, 768, seed=4)

    def gradients():
        leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
        op("linear").linear(*leaves).backward(dy)
        return [t.grad for t in leaves]

    first = gradients()
    exact = (dy.double() @ w.double(), dy.double().T @ x.double(), dy.double().sum(0))
    for ours, theirs in zip(first, exact, strict=True):
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < 5e-3
    for _ in range(200):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), first, strict=True))
