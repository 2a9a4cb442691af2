"""What operators share has the bits of its definition for every kind of number, and is cached by what decides it."""

import os
import shutil
import subprocess
import sys
from importlib import util

import pytest
import torch

from skyrl_isoexec.kernels import numeric
from skyrl_isoexec.kernels.numeric import cpu
from skyrl_isoexec.kernels.numeric.inputs import FINITE, NOT_FINITE, hazards
from skyrl_isoexec.schedule.bits import bit_view


@cpu.compiled
def apply(x, size, exponentials, narrowed, widened, sums):
    """Every shared function over `size` numbers; `sums` gets one number per group of 16."""
    for i in range(size):
        cpu.f32(exponentials)[i] = cpu.exp(cpu.f32(x)[i])
    for i in range(size):
        cpu.u16(narrowed)[i] = cpu.narrow(cpu.f32(x)[i])
    for i in range(size):
        cpu.f32(widened)[i] = cpu.widen(cpu.u16(narrowed)[i])
    for i in range(size // 16):
        cpu.f32(sums)[i] = cpu.lane_tree(cpu.f32(x + 4 * 16 * i))


@pytest.fixture(scope="module")
def numbers() -> torch.Tensor:
    """Random bit patterns (so every exponent, subnormals and NaN), usual arguments, and the corners of exp."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32).view(torch.float32)
    usual = torch.randn(50_000, generator=generator) * 30
    corners = torch.tensor([*FINITE, *NOT_FINITE, 88.72283, 88.72284, 88.72285, -87.5, -103.97, -103.98, -104.0])
    return torch.cat([patterns, usual, corners, torch.zeros(10)])


@pytest.fixture(scope="module")
def compiled_results(numbers):
    size = numbers.numel()
    assert size % 16 == 0
    floats = [torch.full((size,), float("nan")) for _ in range(2)]
    narrowed, sums = torch.empty(size, dtype=torch.bfloat16), torch.empty(size // 16)
    apply(numbers.data_ptr(), size, floats[0].data_ptr(), narrowed.data_ptr(), floats[1].data_ptr(), sums.data_ptr())
    return floats[0], narrowed, floats[1], sums


def test_bits_of_the_definition(numbers, compiled_results, same_bits):
    exponentials, narrowed, widened, sums = compiled_results
    same_bits(exponentials, numeric.exp(numbers))
    assert torch.equal(bit_view(narrowed), bit_view(numeric.narrow(numbers, torch.bfloat16)))  # NaN payload too
    same_bits(narrowed, numbers.bfloat16())
    same_bits(widened, narrowed.float())
    same_bits(sums, numeric.lane_tree(numbers.view(-1, 16)))


def test_exp_is_close_and_hides_nothing(numbers):
    """Within 1e-7 of float64 where the result is normal; NaN stays, overflow is inf, underflow +0, exp(0) is 1."""
    exact = numbers.double().exp()
    ours = numeric.exp(numbers)
    normal = (exact > 1.2e-38) & (exact < 3.4e38)
    assert normal.sum() > 10_000 and ((ours.double() - exact) / exact)[normal].abs().max() < 1e-7
    subnormal = (exact > 0) & (exact < 1.17e-38) & (numbers > -103)
    assert subnormal.any() and (ours.double() - exact)[subnormal].abs().max() <= 1.5e-45
    assert ours[numbers.isnan()].isnan().all()
    assert numeric.exp(torch.tensor([0.0, -0.0, 89.0, -105.0, float("-inf")])).tolist() == [1, 1, float("inf"), 0, 0]


def test_exp_has_a_derivative():
    x = torch.linspace(-5, 5, 101).requires_grad_()
    (grad,) = torch.autograd.grad(numeric.exp(x).sum(), x)
    assert ((grad - x.exp()) / x.exp()).abs().max() < 1e-5


def test_sqrt_is_correctly_rounded():
    x = hazards(0, 999, finite=True).abs()
    root = numeric.sqrt(x).double()
    below, above = (torch.nextafter(root.float(), torch.tensor(v)).double() for v in (0.0, float("inf")))
    assert ((root * root - x).abs() <= (below * below - x).abs()).all()
    assert ((root * root - x).abs() <= (above * above - x).abs()).all()


def test_lane_sum_is_lanes_then_tree():
    x = torch.arange(1, 41.0)
    lanes = [sum(x[lane::16].tolist()) for lane in range(16)]
    assert numeric.lane_sum(x).item() == sum(lanes)
    a, b = torch.tensor([1e8, 1.0, -1e8, 1.0] + [0.0] * 12), torch.tensor([1e8, -1e8, 1.0, 1.0] + [0.0] * 12)
    assert numeric.lane_sum(a).item() == 0.0 and numeric.lane_sum(b).item() == 2.0  # neighbours first


def test_narrow_refuses_other_dtypes():
    with pytest.raises(TypeError, match="float16"):
        numeric.narrow(torch.ones(1), torch.float16)


def test_hazards_hold_their_values():
    x = hazards(1, 20, 30, finite=False)
    for value in FINITE:
        assert (bit_view(x) == bit_view(torch.tensor(value))).any()
    assert x.isnan().any() and x.isposinf().any() and x.isneginf().any()
    with pytest.raises(ValueError, match="too small"):
        hazards(1, 3, 3)


def load(path):
    """A module from a file, whatever was loaded from it before."""
    spec = util.spec_from_file_location(path.stem, path)
    module = util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_cached_code_follows_its_sources(tmp_path, monkeypatch):
    """A change in a neighbouring file, which the compiler's own key would miss, is another file in the cache."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "callee_of_cached.py").write_text("STEP = 1\n")
    caller = tmp_path / "cached_caller.py"
    caller.write_text(
        "from callee_of_cached import STEP\n"
        "from skyrl_isoexec.kernels.numeric.cpu import compiled\n"
        "@compiled\n"
        "def step(x):\n"
        "    return x + STEP\n"
    )
    assert load(caller).step(1) == 2 and load(caller).step(1) == 2
    files = {p.name for p in tmp_path.rglob("*.nbc")}
    assert len(files) == 1
    (tmp_path / "callee_of_cached.py").write_text("STEP = 5\n")
    shutil.rmtree(tmp_path / "__pycache__" / "callee_of_cached.cpython-311.pyc", ignore_errors=True)
    del sys.modules["callee_of_cached"]
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        assert load(tmp_path / "cached_caller.py").step(1) == 6
    finally:
        sys.dont_write_bytecode = before
    assert len({p.name for p in tmp_path.rglob("*.nbc")}) == 2


@pytest.mark.slow
def test_many_processes_may_start_at_once(tmp_path):
    """Four processes that find an empty cache compute the same and leave one file per function."""
    code = (
        "import torch; from skyrl_isoexec.kernels.swiglu.cpu import silu_mul\n"
        "x = torch.linspace(-9, 9, 1001); print(silu_mul(x, x).view(torch.int32).sum().item())"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    results = [process.communicate(timeout=200)[0] for process in started]
    assert len(set(results)) == 1 and results[0].strip()
    assert len(list(tmp_path.rglob("*.nbc"))) == 1
