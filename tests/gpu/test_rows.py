"""Norms, rotation, activation, gather and log-probabilities have the bits that eager PyTorch states, on the device."""

import pytest
import torch

BF16 = torch.bfloat16
STATED = [
    ("rmsnorm", "add_rmsnorm", "reference_sm90", "cases", (1e-6,)),
    ("rmsnorm", "add_rmsnorm", "reference_sm90", "cases", (1e-6, 1.0)),
    ("rmsnorm", "gated_rmsnorm", "reference_sm90", "gated_cases", (1e-6,)),
    ("rope", "rope", "reference", "cases", ()),
    ("swiglu", "silu_mul", "reference", "cases", ()),
    ("swiglu", "sigmoid_mul", "reference", "sigmoid_cases", ()),
    ("embedding", "embedding", "reference", "cases", ()),
]


def pairs(a, b):
    return zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]


@pytest.mark.parametrize("name, function, definition, cases, constants", STATED)
def test_bits_of_the_definition(name, function, definition, cases, constants, op, differing):
    """Every case, hazards included: definition on the CPU, kernel on the device."""
    for label, case in getattr(op(name, "cases"), cases)(BF16).items():
        theirs = getattr(op(name, definition), function)(*case, *constants)
        ours = getattr(op(name), function)(*(t.cuda() for t in case), *constants)
        for a, b in pairs(ours, theirs):
            if b.numel():
                assert differing(a.cpu(), b) == 0, label


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("width", [64, 128, 256, 2048, 4096, 5120])
def test_norm_of_large_batches(width, offset, op, normal, differing):
    x, residual, w = normal(1025, width, seed=1), normal(1025, width, seed=2), normal(width, seed=3)
    y, total = op("rmsnorm").add_rmsnorm(x, residual, w, 1e-6, offset)
    theirs = op("rmsnorm", "reference_sm90").add_rmsnorm(x.cpu(), residual.cpu(), w.cpu(), 1e-6, offset)
    assert differing(y.cpu(), theirs[0]) == 0 and differing(total.cpu(), theirs[1]) == 0
    for m in (1, 2, 17, 33, 64, 128, 257):
        assert differing(op("rmsnorm").add_rmsnorm(x[:m], residual[:m], w, 1e-6, offset)[0], y[:m]) == 0
        assert differing(op("rmsnorm").rmsnorm(total[:m], w, 1e-6, offset), y[:m]) == 0


@pytest.mark.parametrize("width", [128, 256, 4096])
def test_gated_norm_of_large_batches(width, op, normal, differing):
    x, z, w = normal(8195, width, seed=1), normal(8195, width, seed=2, scale=3.0), normal(width, seed=3)
    y = op("rmsnorm").gated_rmsnorm(x, z, w, 1e-6)
    theirs = op("rmsnorm", "reference_sm90").gated_rmsnorm(x[:999].cpu(), z[:999].cpu(), w.cpu(), 1e-6)
    assert differing(y[:999].cpu(), theirs) == 0
    for m in (1, 2, 17, 33, 64, 128, 257, 4097):
        assert differing(op("rmsnorm").gated_rmsnorm(x[-m:], z[-m:], w, 1e-6), y[-m:]) == 0


def test_the_rest_of_a_head_is_copied(op):
    """NaN included, payload by payload, and 192 of 256 dimensions beside a rotation."""
    cases = op("rope", "cases")
    for x, rotated in ((cases.payloads(BF16), 8), (cases.cases(BF16)["64 of 256"][0], 64)):
        positions = torch.arange(len(x), device="cuda")
        y = op("rope").rope(x.cuda(), positions, cases.table(rotated).cuda()).cpu()
        assert torch.equal(y.view(torch.int16)[..., rotated:], x.view(torch.int16)[..., rotated:])


def test_activation_of_every_bf16_number(op, differing):
    bits = torch.arange(-32768, 32768).to(torch.int16).view(BF16)
    assert int((bits.float().abs() < 2**-126).sum()) > 200  # zeros and subnormals
    up = bits.flip(0).roll(1000)
    ours = op("swiglu").silu_mul(bits.cuda(), up.cuda())
    assert differing(ours.cpu(), op("swiglu", "reference").silu_mul(bits, up)) == 0
    for x, gate in ((up, bits), (up.view(-1, 8), bits.view(-1, 8)[:, :1])):
        ours = op("swiglu").sigmoid_mul(x.cuda(), gate.cuda())
        assert differing(ours.cpu(), op("swiglu", "reference").sigmoid_mul(x, gate)) == 0


@pytest.mark.parametrize("width", [1, 2048])
def test_output_gate_of_large_batches(width, op, normal, differing):
    """[T, 1] and [T, F]."""
    x, gate = normal(8195, 2048, seed=1), normal(8195, width, seed=2, scale=4.0)
    y = op("swiglu").sigmoid_mul(x, gate)
    assert differing(y[:999].cpu(), op("swiglu", "reference").sigmoid_mul(x[:999].cpu(), gate[:999].cpu())) == 0
    for m in (1, 2, 17, 33, 64, 128, 257, 4097):
        assert differing(op("swiglu").sigmoid_mul(x[-m:], gate[-m:]), y[-m:]) == 0


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

    def exact_norm(x, r, w, offset=0.0):
        s = x + r
        return s * (s.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (w + offset), s

    def exact_gated(x, z, w):
        return exact_norm(x, 0.0, w)[0] * torch.nn.functional.silu(z)

    wide, token_gate = [t.double() for t in (dy, dtotal)], normal(3000, 1, seed=6)
    heads = [t.view(-1, 128) for t in (x, residual, dy)]
    cases = {
        "norm": (lambda *a: op("rmsnorm").add_rmsnorm(*a, 1e-6), exact_norm, (x, residual, w), (dy, dtotal), wide),
        "zero-centred": (
            lambda *a: op("rmsnorm").add_rmsnorm(*a, 1e-6, 1.0), lambda *a: exact_norm(*a, 1.0), (x, residual, w),
            (dy, dtotal), wide,
        ),
        "gated": (
            lambda *a: op("rmsnorm").gated_rmsnorm(*a, 1e-6), exact_gated, (*heads[:2], w[:128].clone()), heads[2],
            heads[2].double(),
        ),
        "activation": (
            op("swiglu").silu_mul, lambda g, u: torch.nn.functional.silu(g) * u, (x, residual), dy, dy.double(),
        ),
        "output gate": (op("swiglu").sigmoid_mul, lambda x, g: x * g.sigmoid(), (x, residual), dy, dy.double()),
        "gate of a token": (op("swiglu").sigmoid_mul, lambda x, g: x * g.sigmoid(), (x, token_gate), dy, dy.double()),
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
        lambda: op("rmsnorm").rmsnorm(x, w, 1e-6, 1.0),
        lambda: op("rmsnorm").gated_rmsnorm(heads, heads, w[:128], 1e-6),
        lambda: op("swiglu").silu_mul(x, x),
        lambda: op("swiglu").sigmoid_mul(x, x),
        lambda: op("swiglu").sigmoid_mul(x, x[:, :1]),
        lambda: op("rope").rope(heads, positions, table),
        lambda: op("rope").rope(heads, positions, table[:, :32]),
        lambda: op("embedding").embedding(positions, x),
    ):
        assert differing(replayed(run), run()) == 0
