"""A linear's element is a function of its row and its column alone, and of the order that the reference states."""

import threading

import pytest
import torch

from skyrl_isoexec.kernels.linear import cpu, reference
from skyrl_isoexec.kernels.linear.cases import ROW_COUNTS, cases
from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.schedule.bits import count_mismatches


@pytest.mark.parametrize("name", cases(torch.float32))
def test_bits_of_the_reference(name, dtype, same_bits):
    """Both result dtypes, with and without bias, with and without a packed weight."""
    x, w, bias = cases(dtype)[name]
    packed = cpu.pack(w)
    for out_dtype in (None, torch.float32, torch.bfloat16):
        for b in (None, bias):
            expected = reference.linear(x, w, b, out_dtype)
            same_bits(cpu.linear(x, w, b, out_dtype), expected)
            same_bits(cpu.linear(x, w, b, out_dtype, packed), expected)
            same_bits(reference.linear(x, w, b, out_dtype, packed), expected)


def test_hazards_are_reached(dtype):
    """Zeros of both signs, subnormals and NaN are among the inputs and the results."""
    x, w, _ = cases(dtype)["finite hazards"]
    assert (x == 0).logical_and(torch.signbit(x)).any() and ((x != 0) & (x.abs() < 1.17e-38)).any()
    x, w, _ = cases(dtype)["hazards"]
    y = cpu.linear(x, w)
    assert y.isnan().any() and not y.isnan().all()
    minus_zero = torch.full((1, 3), -0.0, dtype=dtype)
    assert not torch.signbit(cpu.linear(minus_zero, -minus_zero)).any()  # the accumulator starts at +0


def test_a_row_keeps_its_bits(dtype, same_bits):
    """An anchor row first, in the middle and last among 1 to 257 rows."""
    w, rows = normal(1, 2048, 2048, dtype=dtype), normal(2, max(ROW_COUNTS), 2048, dtype=dtype)
    packed = cpu.pack(w)
    anchor = normal(3, 1, 2048, dtype=dtype)
    expected = cpu.linear(anchor, w)
    for count in ROW_COUNTS:
        for place in {0, count // 2, count - 1}:
            x = rows[:count].clone()
            x[place] = anchor[0]
            same_bits(cpu.linear(x, w, packed=packed)[place], expected[0])
    same_bits(cpu.linear(x, w)[place], expected[0])


def test_column_shards_are_slices(dtype, same_bits):
    """Ranks that own columns compute slices of the whole, also where a slice is no multiple of a panel."""
    x, w, bias = normal(1, 5, 70, dtype=dtype), normal(2, 96, 70, dtype=dtype), normal(3, 96, dtype=dtype)
    whole = cpu.linear(x, w, bias)
    for size in (2, 4, 8):
        shards = zip(w.chunk(size), bias.chunk(size), strict=True)
        same_bits(torch.cat([cpu.linear(x, part, b) for part, b in shards], 1), whole)


def test_strides_do_not_matter(dtype, same_bits):
    """Transposed and sliced operands."""
    x, w = normal(1, 6, 40, dtype=dtype), normal(2, 21, 40, dtype=dtype)
    expected = cpu.linear(x, w)
    same_bits(cpu.linear(x.t().contiguous().t(), w.t().contiguous().t()), expected)
    wide = torch.cat([x, x], 1)
    same_bits(cpu.linear(wide[:, :40], w), expected)


def test_pack_keeps_its_address(dtype, same_bits):
    """A refresh writes into the old buffer, and a buffer of another shape is refused."""
    old, new = normal(1, 37, 20, dtype=dtype), normal(2, 37, 20, dtype=dtype)
    packed = cpu.pack(old)
    address = packed.data_ptr()
    assert cpu.pack(new, packed).data_ptr() == address
    same_bits(packed, cpu.pack(new))
    with pytest.raises(ValueError, match="pack: out"):
        cpu.pack(new[:, :19], packed)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((torch.ones(2, 3, 4), torch.ones(5, 4)), ValueError),
        ((torch.ones(3, 4), torch.ones(5, 6)), ValueError),
        ((torch.ones(3, 4), torch.ones(5, 4).bfloat16()), TypeError),
        ((torch.ones(3, 4).half(), torch.ones(5, 4).half()), TypeError),
        ((torch.ones(3, 4), torch.ones(5, 4), torch.ones(6)), ValueError),
        ((torch.ones(3, 4), torch.ones(5, 4), None, torch.float64), TypeError),
        ((torch.ones(3, 4), torch.ones(5, 4), None, None, torch.ones(1, 4, 8)), ValueError),
        ((torch.ones(3, 4, device="meta"), torch.ones(5, 4, device="meta")), ValueError),
    ],
)
def test_refusals(arguments, error):
    """Three dimensions, shapes and dtypes that do not fit, and memory that is not the CPU's."""
    with pytest.raises(error):
        cpu.linear(*arguments)


def test_backward(dtype, check_backward):
    check_backward(cpu.linear, reference.linear, *(a[:17] for a in cases(dtype)["odd"]))


def test_backward_of_an_fp32_result(dtype, check_backward):
    """The head: fp32 gradients come back for operands of either dtype."""
    x, w, _ = cases(dtype)["odd"]
    ours, theirs = (lambda x, w, op=op: op(x, w, None, torch.float32) for op in (cpu.linear, reference.linear))
    check_backward(ours, theirs, x, w)


def test_only_wanted_gradients(dtype):
    """A frozen weight gets none."""
    x, w, bias = cases(dtype)["odd"]
    cpu.linear(x.requires_grad_(), w, bias).sum().backward()
    assert x.grad is not None and w.grad is None and bias.grad is None


def test_the_gate_can_fail():
    """Exchanging two k in x and in w leaves the mathematics alone and changes bits: the order is what is tested."""
    x, w = normal(1, 8, 64), normal(2, 32, 64)
    order = torch.arange(64)
    order[[3, 40]] = order[[40, 3]]
    mismatched, _ = count_mismatches(cpu.linear(x, w), cpu.linear(x[:, order], w[:, order]))
    assert mismatched > 0


def test_products_round_before_they_are_added():
    """x * x - round(x * x) is 0, and would not be if product and sum were fused."""
    x = normal(1, 64, 1)
    rounded = x * x
    assert (rounded.double() != x.double() ** 2).any()
    for t in range(64):
        y = cpu.linear(torch.cat([x[t], -rounded[t]])[None], torch.stack([torch.cat([x[t], torch.ones(1)])]))
        assert y.item() == 0.0


def test_threads_do_not_share_scratch(same_bits):
    """Four threads at once, without the interpreter lock, get what one gets."""
    x, w = normal(1, 40, 300).bfloat16(), normal(2, 90, 300).bfloat16()
    expected, results = cpu.linear(x, w), []
    threads = [threading.Thread(target=lambda: results.extend(cpu.linear(x, w) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for result in results:
        same_bits(result, expected)
