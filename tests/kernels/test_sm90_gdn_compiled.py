"""The Hopper kernels of a gated delta rule as Triton sees them: what its own rewriting may not do, without a GPU.

Triton turns a sum of a product and something else into a product that starts from it. That changes bits, and where it
finds the sum in a kernel over chunks but not in the decode step, it breaks their equality, which no interpreter shows.
"""

import re
from collections.abc import Iterator

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="compiles")

import triton.language as tl  # noqa: E402
from hopper_source import TARGET, source_of  # noqa: E402

from skyrl_isoexec.kernels.gdn import triton_outputs, triton_step  # noqa: E402
from skyrl_isoexec.kernels.gdn_cpr import triton_recur  # noqa: E402
from skyrl_isoexec.kernels.numeric import sm90, sm90_gdn_chunk, sm90_gdn_rows, sm90_gdn_rows_back  # noqa: E402
from skyrl_isoexec.kernels.numeric.gdn_proof import NARROW  # noqa: E402


def products(kernel: triton.JITFunction, **changes: int) -> Iterator[tuple[str, str]]:
    """(accumulator, operation that made it) of every product of a kernel, after Triton's rewriting."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    source, backend = source_of(kernel, changes), make_backend(TARGET)
    options, context, stages = backend.parse_options(sm90.EXACT), ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        TARGET,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    backend.add_stages(stages, options, source.language)
    text = str(stages["ttir"](module, {}))
    made = dict(re.findall(r"(%[\w#]+)(?::\d+)? = (\S+)", text))
    for accumulator in re.findall(r"= tt\.dot %[\w#]+, %[\w#]+, (%[\w#]+)", text):
        yield accumulator, made.get(accumulator, "argument")


@pytest.mark.parametrize(("key_width", "width"), [(128, 128), *NARROW])
@pytest.mark.parametrize(
    "kernel, zeros, started",
    [
        (sm90_gdn_chunk.prepare, 8, 0),  # scores; X and T three times; Z
        (sm90_gdn_chunk.walk, 2, 1),  # k S0 of closed and of open chunks; the state
        (triton_outputs.attend, 3, 1),  # scores, P T, q S0; P T e from the last
        (triton_outputs.leave, 7, 0),
        (triton_step.step, 6, 4),  # P T and P T e go on over the row's own block, the latter and the state from others
        (triton_recur.enter, 0, 0),
        (triton_recur.close, 9, 1),
    ],
)
def test_a_product_starts_from_what_is_written(kernel, zeros, started, key_width, width):
    """From zeros, or from an accumulator that the kernel names: never from a sum that Triton has moved into it."""
    found = [operation for _, operation in products(kernel, DK=key_width, DV=width, BV=32)]
    assert found.count("arith.constant") == zeros and len(found) == zeros + started
    assert not {"arith.addf", "arith.subf"} & set(found)


@pytest.mark.parametrize(("key_width", "width"), [(128, 128), *NARROW])
@pytest.mark.parametrize("kernel", [sm90_gdn_rows.make_rows, sm90_gdn_rows_back.rows_back])
def test_rows_of_unequal_widths(kernel, key_width, width):
    """Branches for keys and for values have tiles of their own; the interpreter takes any, the compiler does not."""
    assert not list(products(kernel, DK=key_width, DV=width, HB=4, ROWS=32))


@triton.jit
def _sum_of_a_product(q, k, out, C: tl.constexpr):
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    product = tl.dot(tl.load(q + at), tl.load(k + at), tl.zeros((C, C), tl.float32))
    tl.store(out + at, (product + tl.exp2(product * 0.0)).to(tl.bfloat16))


@triton.jit
def _sum_that_is_moved(q, k, out, C: tl.constexpr):
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    other = tl.exp2(tl.load(out + at).to(tl.float32))
    product = tl.dot(tl.load(q + at), tl.load(k + at), tl.zeros((C, C), tl.float32))
    tl.store(out + at, (product + other).to(tl.bfloat16))


def test_the_hazard_exists_and_is_seen():
    """Where only the sum uses the product, Triton moves it; where something else does too, it cannot."""
    assert [operation for _, operation in products(_sum_that_is_moved)] == ["math.exp2"]
    assert [operation for _, operation in products(_sum_of_a_product)] == ["arith.constant"]
