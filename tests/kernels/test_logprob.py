"""How close log-probabilities are, what they refuse and differentiate; their bits are proved by their gate."""

import pytest
import torch

from skyrl_isoexec.kernels.logprob import cases, cpu, reference
from skyrl_isoexec.kernels.numeric import lane_tree
from skyrl_isoexec.schedule.bits import count_mismatches

MODULES = [cpu, reference]
TEMPERATURES = [1.0, 0.6, 1.5, "rows"]
BITS_OF_NAN = 0x7FC00000


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    mismatched, compared = count_mismatches(a, b)
    assert mismatched == 0, f"{mismatched} of {compared} elements differ"


def temperature_of(name: float | str, num_rows: int) -> float | torch.Tensor:
    return torch.linspace(0.5, 2.0, num_rows) if name == "rows" else name


def ids_for(logits: torch.Tensor) -> torch.Tensor:
    return torch.randint(logits.shape[1], logits.shape[:1], generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_nan_stands_for_rows_without_a_distribution(kind: str, module) -> None:
    """A gate leaves the payload free; here such a row is the quiet NaN throughout, and no other row has one."""
    rows = module.logprobs(cases.rows(kind, 9, 640), num_leaves=8)
    assert (rows.view(torch.int32) == BITS_OF_NAN).all() if kind == "refused" else not rows.isnan().any()


@pytest.mark.parametrize("module", MODULES)
def test_one_token(module) -> None:
    """A vocabulary of one token has log-probability zero, whatever the sign of a zero logit."""
    assert (module.logprobs(torch.tensor([[3.0], [0.0], [-1e30]])) == 0).all()
    assert_equal(module.row_max(torch.tensor([[-0.0, -1.0]])), torch.tensor([0.0]))


def test_log_of_every_size() -> None:
    """The logarithm's series gives float64's logarithm, rounded once to fp32."""
    totals = torch.cat([torch.linspace(1, 2, 4097), torch.logspace(0, 6, 4096), 2.0 ** torch.arange(24)])
    ours = 0.0 - cpu.finish(torch.zeros_like(totals), torch.zeros_like(totals), totals)
    assert_equal(ours, reference.log(totals))
    exact = totals.double().log()
    assert_equal(ours, exact.float())


@pytest.mark.parametrize("kind", ["normal", "tails", "ties", "zeros"])
def test_bound_against_float64(kind: str) -> None:
    """Within 4e-6 plus one fp32 rounding of the result, of float64, at 20,000 tokens of vocabulary."""
    logits = cases.rows(kind, 8, 20000)
    exact = torch.log_softmax(logits.double(), 1)
    for num_leaves in (1, 8):
        error = (cpu.logprobs(logits, num_leaves=num_leaves).double() - exact).abs()
        assert (error <= 4e-6 + 2**-23 * exact.abs()).all()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("temperature", [1.0, 0.6, "rows"])
def test_gradients(temperature: float | str, module) -> None:
    """Token log-probabilities and entropy: gradients within 1e-5 of float64 autograd, and equal when repeated."""
    logits, grad = cases.rows("normal", 10, 333), torch.linspace(-1, 1, 10)
    at, ids = temperature_of(temperature, 10), ids_for(logits)
    exact = logits.double().requires_grad_()
    divisor = at[:, None].double() if isinstance(at, torch.Tensor) else at
    logp = torch.log_softmax(exact / divisor, 1)
    entropy = -(logp.exp() * logp).sum(1)
    for target, function in (
        (logp.gather(1, ids[:, None])[:, 0], lambda x: module.token_logprobs(x, ids, at)),
        (entropy, lambda x: module.entropy(x, at)),
    ):
        (expected,) = torch.autograd.grad(target, exact, grad.double(), retain_graph=True)
        got = []
        for _ in range(2):
            x = logits.clone().requires_grad_()
            out = function(x)
            torch.testing.assert_close(out.double(), target, rtol=1e-5, atol=1e-5)
            out.backward(grad)
            got.append(x.grad)
        assert (got[0].double() - expected).abs().max() < 1e-5
        assert_equal(*got)
    x = cases.rows("minus_inf", 10, 333).requires_grad_()
    (module.token_logprobs(x, x.argmax(1)) + module.entropy(x)).sum().backward()
    assert x.grad.isfinite().all() and (x.grad[x == float("-inf")] == 0).all()


def test_tree_is_the_shared_one() -> None:
    """`total` adds leaves as the lanes of a row are added: neighbours first."""
    sums = cases.rows("normal", 16, 50)
    assert_equal(cpu.total(sums), lane_tree(sums.T))


@pytest.mark.parametrize("module", MODULES)
def test_no_rows(module) -> None:
    """An empty batch is empty."""
    none, ids = torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64)
    assert module.logprobs(none).shape == (0, 10)
    assert module.token_logprobs(none, ids).shape == (0,)
    assert module.token_logprobs(none.requires_grad_(), ids, torch.zeros(0)).shape == (0,)
    assert module.entropy(none).shape == (0,)


@pytest.mark.parametrize("module", MODULES)
def test_refusals(module) -> None:
    """What is not defined raises and names the values."""
    logits, ids = torch.zeros(2, 10), torch.tensor([0, 9])
    with pytest.raises(ValueError, match="vocabulary size 10 is not a multiple of num_leaves 4"):
        module.logprobs(logits, num_leaves=4)
    with pytest.raises(ValueError, match="num_leaves 5 is not a power of two"):
        module.token_logprobs(logits, ids, num_leaves=5)
    with pytest.raises(TypeError, match="bfloat16"):
        module.logprobs(logits.bfloat16())
    with pytest.raises(ValueError, match="token ids 0..10 lie outside a vocabulary of 10"):
        module.token_logprobs(logits, torch.tensor([0, 10]))
    with pytest.raises(ValueError, match="token ids -100..1"):
        module.token_logprobs(logits, torch.tensor([-100, 1]))
    with pytest.raises(TypeError, match="int64"):
        module.token_logprobs(logits, ids.int())
    for bad in (0.0, -1.0, float("nan"), float("inf"), torch.tensor([1.0, 0.0])):
        with pytest.raises(ValueError, match="temperature"):
            module.logprobs(logits, bad)
    with pytest.raises(TypeError, match="temperature"):
        module.logprobs(logits, torch.ones(3))
    with pytest.raises(ValueError, match="power of two"):
        module.total(torch.ones(3, 2))
