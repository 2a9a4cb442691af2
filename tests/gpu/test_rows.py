"""Norms, rotation, activation, gather and log-probabilities have the bits that eager PyTorch states, on the device."""

import pytest
import torch

BF16 = torch.bfloat16
STATED = [
    ("rmsnorm", "add_rmsnorm", "reference_sm90"),
    ("rope", "rope", "reference"),
    ("swiglu", "silu_mul", "reference"),
    ("embedding", "embedding", "reference"),
]


def pairs(a, b):
    return zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]


@pytest.mark.parametrize("name, function, definition", STATED)
def test_bits_of_the_definition(name, function, definition, op, differing):
    """Every case, hazards included: definition on the CPU, kernel on the device."""
    for label, case in op(name, "cases").cases(BF16).items():
        extra = (1e-6,) if name == "rmsnorm" else ()
        theirs = getattr(op(name, definition), function)(*case, *extra)
        ours = getattr(op(name), function)(*(t.cuda() for t in case), *extra)
        for a, b in pairs(ours, theirs):
            if b.numel():
                assert differing(a.cpu(), b) == 0, label


@pytest.mark.parametrize("width", [64, 128, 2048, 4096, 5120])
def test_norm_of_large_batches(width, op, normal, differing):
    x, residual, w = normal(1025, width, seed=1), normal(1025, width, seed=2), normal(width, seed=3)
    y, total = op("rmsnorm").add_rmsnorm(x, residual, w, 1e-6)
    theirs = op("rmsnorm", "reference_sm90").add_rmsnorm(x.cpu(), residual.cpu(), w.cpu(), 1e-6)
    assert differing(y.cpu(), theirs[0]) == 0 and differing(total.cpu(), theirs[1]) == 0
    for m in (1, 2, 17, 33, 64, 128, 257):
        assert differing(op("rmsnorm").add_rmsnorm(x[:m], residual[:m], w, 1e-6)[0], y[:m]) == 0
        assert differing(op("rmsnorm").rmsnorm(total[:m], w, 1e-6), y[:m]) == 0


def test_activation_of_every_bf16_number(op, differing):
    bits = torch.arange(-32768, 32768).to(torch.int16).view(BF16)
    assert int((bits.float().abs() < 2**-126).sum()) > 200  # zeros and subnormals
    up = bits.flip(0).roll(1000)
    ours = op("swiglu").silu_mul(bits.cuda(), up.cuda())
    assert differing(ours.cpu(), op("swiglu", "reference").silu_mul(bits, up)) == 0


@pytest.mark.parametrize("size, leaves", [(40, 4), (50_304, 1), (151_936, 8), (248_320, 1)])
def test_logprob_has_the_bits_of_its_definition(size, leaves, op, differing):
    kernel, definition, cases = op("logprob"), op("logprob", "reference_sm90"), op("logprob", "cases")
    for kind in cases.KINDS:
        x, ids = cases.rows(kind, 3, size), torch.tensor([0, 3, size - 1])
        assert cases.reached(kind, x)
        for temperature in (1.0, 0.6, torch.tensor([0.7, 1.0, 1.5])):
            there = temperature.cuda() if isinstance(temperature, torch.Tensor) else temperature
            whole = definition.logprobs(x, temperature, num_leaves=leaves)
            y = x.cuda()
            assert differing(kernel.logprobs(y, there, num_leaves=leaves).cpu(), whole) == 0, kind
            token = kernel.token_logprobs(y, ids.cuda(), there, num_leaves=leaves)
            assert differing(token.cpu(), whole.gather(1, ids[:, None])[:, 0]) == 0, kind
            m = kernel.row_max(y, there)
            sums = kernel.leaf_sums(y, m, leaves, there)
            for ranks in (d for d in (2, 4, 8) if d <= leaves):
                parts = [kernel.leaf_sums(part.contiguous(), m, leaves // ranks, there) for part in y.chunk(ranks, 1)]
                assert differing(torch.cat(parts), sums) == 0
            g = kernel.grad_logits(torch.ones_like(m), y, ids.cuda(), m, kernel.total(sums), there)
            theirs = definition.grad_logits(torch.ones(3), x, ids, m.cpu(), kernel.total(sums).cpu(), temperature)
            assert differing(g.cpu(), theirs) == 0, kind


def test_logprob_of_a_row_does_not_depend_on_the_batch(op, differing, replayed):
    kernel, x = op("logprob"), torch.randn(257, 151_936, device="cuda") * 4
    ids = torch.arange(257, device="cuda") * 500
    whole = kernel.token_logprobs(x, ids)
    exact = x.double().log_softmax(1).gather(1, ids[:, None])[:, 0]
    assert (whole.double() - exact).abs().max() < 5e-6
    for m in (1, 2, 17, 64, 128):
        assert differing(kernel.token_logprobs(x[:m], ids[:m]), whole[:m]) == 0
    assert differing(replayed(lambda: kernel.token_logprobs(x, ids)), whole) == 0
    assert all(torch.equal(kernel.token_logprobs(x[:9], ids[:9]), whole[:9]) for _ in range(200))


def test_gradients_repeat_and_hold_a_bound(op, normal):
    x, w, residual = normal(3000, 2048, seed=1), normal(2048, seed=2), normal(3000, 2048, seed=3)
    dy, dtotal = normal(3000, 2048, seed=4), normal(3000, 2048, seed=5)

    def gradients(function, *arguments, upstream):
        leaves = [t.clone().requires_grad_() for t in arguments]
        torch.autograd.backward(function(*leaves), upstream)
        return [t.grad for t in leaves]

    def exact_norm(x, r, w):
        s = x + r
        return s * (s.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w, s

    wide = [t.double() for t in (dy, dtotal)]
    cases = {
        "norm": (lambda *a: op("rmsnorm").add_rmsnorm(*a, 1e-6), exact_norm, (x, residual, w), (dy, dtotal), wide),
        "activation": (
            op("swiglu").silu_mul, lambda g, u: torch.nn.functional.silu(g) * u, (x, residual), dy, dy.double(),
        ),
    }  # fmt: skip
    for name, (ours, theirs, arguments, upstream, wide_upstream) in cases.items():
        first = gradients(ours, *arguments, upstream=upstream)
        exact = gradients(theirs, *(t.double() for t in arguments), upstream=wide_upstream)
        for a, b in zip(first, exact, strict=True):
            assert ((a.double() - b).norm() / b.norm()).item() < 1e-2, name
        for _ in range(50):
            again = gradients(ours, *arguments, upstream=upstream)
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True)), name


def test_embedding_gradient_repeats(op, normal):
    w, ids = normal(1000, 512, seed=1), torch.randint(1000, (5000,), device="cuda")
    ids[:500] = 7
    dy, seen = normal(5000, 512, seed=2), set()
    for _ in range(50):
        leaf = w.clone().requires_grad_()
        op("embedding").embedding(ids, leaf).backward(dy)
        seen.add(leaf.grad.view(torch.int16).cpu().numpy().tobytes())
    assert len(seen) == 1
    exact = torch.zeros(1000, 512, device="cuda", dtype=torch.float64).index_add_(0, ids, dy.double())
    assert ((leaf.grad.double() - exact).norm() / exact.norm()).item() < 1e-2


def test_rows_in_a_graph(op, normal, differing, replayed):
    x, w = normal(64, 4096, seed=1), normal(4096, seed=2)
    table = torch.randn(100, 128, device="cuda")
    heads, positions = x.view(64, 32, 128), torch.arange(64, device="cuda")
    for run in (
        lambda: op("rmsnorm").rmsnorm(x, w, 1e-6),
        lambda: op("swiglu").silu_mul(x, x),
        lambda: op("rope").rope(heads, positions, table),
        lambda: op("embedding").embedding(positions, x),
    ):
        assert differing(replayed(run), run()) == 0
