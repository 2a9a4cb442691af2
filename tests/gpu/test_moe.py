"""A mixture of experts on the device: choices and sums have stated bits, a row has its linear's, in any spread."""

from itertools import pairwise

import pytest
import torch

from skyrl_isoexec.kernels.numeric.bound import product_bound

BF16 = torch.bfloat16
SHAPES = ((256, 1024, 2048), (256, 2048, 512), (64, 3072, 2048), (5, 72, 200))
"""(E, N, K): gate and up, and down, of Qwen3.5-35B-A3B; gate and up of GLM-4.7-Flash; sizes that no tile divides."""


def spread(kind: str, num_experts: int, num_rows: int) -> torch.Tensor:
    """int32 starts on the device."""
    counts = torch.zeros(num_experts, dtype=torch.int64)
    if kind == "even":
        counts += num_rows // num_experts
        counts[: num_rows % num_experts] += 1
    elif kind == "one":
        counts[num_experts // 2] = num_rows
    else:
        seeded = torch.Generator().manual_seed(num_rows)
        weights = (torch.arange(num_experts) + 1.0).reciprocal()[torch.randperm(num_experts, generator=seeded)]
        drawn = torch.multinomial(weights, num_rows, replacement=True, generator=seeded)
        counts = drawn.bincount(minlength=num_experts)
    return torch.cat([torch.zeros(1), counts.cumsum(0)]).int().cuda()


def by_linear(op, x, w, starts, dtype=BF16):
    """Every row by the linear of its expert, alone among its expert's rows."""
    parts = [
        op("linear").linear(x[first:last], w[e], None, dtype)
        for e, (first, last) in enumerate(pairwise(starts.tolist()))
        if first < last
    ]
    return torch.cat(parts)


def test_router_has_the_bits_of_its_definition(op, differing):
    """Every case, hazards included: definition on the CPU, kernel on the device."""
    for name, (logits, top_k, rule, bias) in op("router", "cases").cases().items():
        theirs = op("router", "reference").route(logits, top_k, rule, bias)
        ours = op("router").route(logits.cuda(), top_k, rule, None if bias is None else bias.cuda())
        assert torch.equal(ours[1].cpu(), theirs[1]), name
        if logits.numel():
            assert differing(ours[0].cpu(), theirs[0]) == 0, name


@pytest.mark.parametrize("size, top_k, name", [(256, 8, "SOFTMAX"), (64, 4, "SIGMOID"), (64, 4, "GROUPS")])
def test_router_rows_keep_their_choice(size, top_k, name, op, differing, replayed):
    cases = op("router", "cases")
    rule, logits = getattr(cases, name), cases.steps(1, 4096, size).cuda()
    whole = op("router").route(logits, top_k, rule)
    theirs = op("router", "reference").route(logits.cpu(), top_k, rule)
    assert differing(whole[0].cpu(), theirs[0]) == 0 and torch.equal(whole[1].cpu(), theirs[1])
    for m in (1, 2, 17, 64, 257, 1024):
        weights, experts = op("router").route(logits[:m], top_k, rule)
        assert torch.equal(experts, whole[1][:m]) and differing(weights, whole[0][:m]) == 0
    assert differing(replayed(lambda: op("router").route(logits[:64], top_k, rule)[0]), whole[0][:64]) == 0
    recorded = op("router").route(logits.requires_grad_(), top_k, rule)
    assert torch.equal(recorded[1], whole[1]) and differing(recorded[0], whole[0]) == 0
    for _ in range(200):
        assert torch.equal(op("router").route(logits[:300].detach(), top_k, rule)[1], whole[1][:300])


@pytest.mark.parametrize("num_experts, n, k", SHAPES)
@pytest.mark.parametrize("kind", ["even", "one", "skewed"])
def test_experts_rows_are_the_linears(num_experts, n, k, kind, op, normal, differing):
    kernel, w = op("experts"), normal(num_experts, n, k, seed=1, scale=k**-0.5)
    for num_rows in (1, 8, 64, 512, 4096):
        x, starts = normal(num_rows, k, seed=2), spread(kind, num_experts, num_rows)
        for dtype in (BF16, torch.float32):
            y = kernel.grouped_linear(x, w, starts, dtype)
            assert differing(y, by_linear(op, x, w, starts, dtype)) == 0, (num_rows, dtype)


@pytest.mark.parametrize("num_experts, n, k", SHAPES[1:])
def test_experts_tiles_agree_and_hold_a_bound(num_experts, n, k, op, normal, differing):
    kernel, w, x = op("experts"), normal(num_experts, n, k, seed=1, scale=k**-0.5), normal(700, k, seed=2)
    starts = spread("skewed", num_experts, 600) + 50  # rows of nobody on both sides
    tiles = kernel.TABLE.tiles(n, k, 1, k % 8 == 0)
    first = kernel.forward(x, w, starts, torch.float32, tiles[0])
    assert not first[:50].any() and not first[650:].any() and len(tiles) > 2
    for e, (a, b) in enumerate(pairwise(starts.tolist())):
        if a < b:
            exact, bound = product_bound(x[a:b], w[e])
            assert ((first[a:b] - exact).abs() <= bound).all(), e
    for tile in tiles:
        assert differing(kernel.forward(x, w, starts, torch.float32, tile), first) == 0, str(tile)
    half = num_experts // 2
    low, high = (
        kernel.grouped_linear(x, w[:half], starts[: half + 1]),
        kernel.grouped_linear(x, w[half:], starts[half:]),
    )
    cut = int(starts[half])
    assert differing(torch.cat([low[:cut], high[cut:]]), kernel.grouped_linear(x, w, starts)) == 0


@pytest.mark.parametrize("num_rows", [8, 512, 8192])
def test_a_graph_serves_every_spread(num_rows, op, normal, differing):
    """Captured once, replayed for other values of `starts`: no host code depends on them."""
    num_experts, n, k = 64, 512, 1024
    w, x = normal(num_experts, n, k, seed=1, scale=k**-0.5), normal(num_rows, k, seed=2)
    starts = spread("even", num_experts, num_rows)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op("experts").grouped_linear(x, w, starts)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op("experts").grouped_linear(x, w, starts)
    for kind in ("one", "skewed", "even"):
        starts.copy_(spread(kind, num_experts, num_rows))
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert differing(y, by_linear(op, x, w, starts)) == 0, kind


def test_experts_repeat(op, normal):
    x, w, starts = normal(2000, 512, seed=1), normal(16, 256, 512, seed=2), spread("skewed", 16, 2000)
    first = op("experts").grouped_linear(x, w, starts)
    assert all(torch.equal(op("experts").grouped_linear(x, w, starts), first) for _ in range(200))


@pytest.mark.parametrize("n, k", [(256, 512), (72, 200)])
def test_experts_gradients_repeat_and_hold_a_bound(n, k, op, normal):
    x, w, dy = normal(900, k, seed=1), normal(8, n, k, seed=2), normal(900, n, seed=3)
    starts = spread("skewed", 8, 800) + 40

    def gradients():
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        op("experts").grouped_linear(*leaves, starts).backward(dy)
        return [t.grad for t in leaves]

    first = gradients()
    dx, dw = torch.zeros(900, k).cuda().double(), torch.zeros(8, n, k).cuda().double()
    for e, (a, b) in enumerate(pairwise(starts.tolist())):
        dx[a:b], dw[e] = dy[a:b].double() @ w[e].double(), dy[a:b].double().T @ x[a:b].double()
    for ours, theirs in zip(first, (dx, dw), strict=True):
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < 5e-3
    assert not first[0][:40].any() and not first[0][840:].any()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), first, strict=True))


def test_combine_has_the_bits_of_its_definition(op, differing):
    for name, (y, experts, num_experts, weights, shared) in op("combine", "cases").cases(BF16).items():
        definition, kernel = op("combine", "reference"), op("combine")
        order, starts = definition.dispatch(experts, num_experts)
        places = kernel.dispatch(experts.cuda(), num_experts)
        assert torch.equal(places[0].cpu(), order) and torch.equal(places[1].cpu(), starts), name
        if name == "no tokens":
            continue
        rows = kernel.expand(shared.cuda(), places[0]).cpu()
        assert differing(rows, definition.expand(shared, order)) == 0, name
        for also in (None, shared):
            ours = kernel.combine(y[order].cuda(), places[0], weights.cuda(), None if also is None else also.cuda())
            assert differing(ours.cpu(), definition.combine(y[order], order, weights, also)) == 0, name


@pytest.mark.parametrize("num_tokens", [1, 64, 1024, 1025, 16384])
def test_places_are_a_stable_sort(num_tokens, op, monkeypatch):
    """By counting and by sorting, eager and in a graph that is replayed for another choice."""
    kernel = op("combine")
    experts, other = (torch.rand(num_tokens, 256, device="cuda").topk(8).indices.sort(1).values.int() for _ in "ab")
    theirs = [op("combine", "reference").dispatch(x.cpu(), 256) for x in (experts, other)]
    for counted in (0, kernel.COUNTED):
        monkeypatch.setattr(kernel, "COUNTED", counted)
        held = experts.clone()
        kernel.dispatch(held, 256)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            places = kernel.dispatch(held, 256)
        for x, expected in zip((experts, other), theirs, strict=True):
            held.copy_(x)
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(a.cpu(), b) for a, b in zip(places, expected, strict=True)), counted


def test_combine_gradients_repeat_and_hold_a_bound(op, normal):
    experts = op("combine", "cases").chosen(1, 700, 8, 64).cuda()
    order, _ = op("combine").dispatch(experts, 64)
    y, shared, dout = normal(5600, 2048, seed=1), normal(700, 2048, seed=2), normal(700, 2048, seed=3)
    weights = torch.rand(700, 8, device="cuda")

    def gradients(combine, expand, *operands, upstream):
        leaves = [t.clone().requires_grad_() for t in operands]
        combine(*leaves).backward(upstream)
        x = operands[2].clone().requires_grad_()
        expand(x).backward(operands[0])
        return [t.grad for t in (*leaves, x)]

    def exact(y, w, s):
        return (y[order.argsort()].unflatten(0, (700, 8)) * w[:, :, None]).sum(1) + s

    ours = (lambda y, w, s: op("combine").combine(y, order, w, s), lambda x: op("combine").expand(x, order))
    first = gradients(*ours, y, weights, shared, upstream=dout)
    wide = [t.double() for t in (y, weights, shared)]
    theirs = gradients(exact, lambda x: x[order // 8], *wide, upstream=dout.double())
    for a, b in zip(first, theirs, strict=True):
        assert ((a.double() - b).norm() / b.norm()).item() < 5e-3
    for _ in range(50):
        again = gradients(*ours, y, weights, shared, upstream=dout)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_a_token_of_a_layer_does_not_depend_on_the_batch(op, normal, differing, replayed):
    """Router, dispatch, two grouped linears and combine: alone, in any batch, and in a graph; no expert flips."""
    num_experts, hidden, features, top_k = 64, 1024, 256, 8
    rule = op("router", "cases").SOFTMAX
    gate, up = normal(num_experts, hidden, seed=1), normal(num_experts, 2 * features, hidden, seed=2, scale=0.03)
    gate[5] = gate[2]  # their scores tie in every token
    down = normal(num_experts, hidden, features, seed=3, scale=0.06)

    def layer(x):
        weights, experts = op("router").route(op("linear").linear(x, gate, None, torch.float32), top_k, rule)
        order, starts = op("combine").dispatch(experts, num_experts)
        rows = op("experts").grouped_linear(op("combine").expand(x, order), up, starts)
        rows = op("swiglu").silu_mul(*(part.contiguous() for part in rows.chunk(2, 1)))
        return op("combine").combine(op("experts").grouped_linear(rows, down, starts), order, weights, x), experts

    x = normal(1500, hidden, seed=4)
    whole, chosen = layer(x)
    assert int(((chosen == 2).any(1) != (chosen == 5).any(1)).sum()) > 0  # a tie at the cut
    for m in (1, 2, 17, 33, 64, 128, 257, 1024):
        out, experts = layer(x[:m])
        assert torch.equal(experts, chosen[:m]) and differing(out, whole[:m]) == 0, m
    for t in range(0, 1500, 100):
        assert differing(layer(x[t : t + 1])[0], whole[t : t + 1]) == 0
    assert differing(replayed(lambda: layer(x[:64])[0]), whole[:64]) == 0
