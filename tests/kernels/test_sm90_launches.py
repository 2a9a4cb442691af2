"""Every launch of a Hopper kernel leaves products and sums as they are written: none is fused unless `fma` says so.

Triton fuses by default, where it pleases: in one kernel, and not in another that must have the same bits.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from hopper_source import TARGET  # noqa: E402
from triton.compiler import ASTSource, compile  # noqa: E402

from skyrl_isoexec import kernels  # noqa: E402
from skyrl_isoexec.kernels.numeric.sm90 import EXACT  # noqa: E402

FOLDER = Path(kernels.__file__).parent
SOURCES = [
    path.relative_to(FOLDER) for path in sorted(FOLDER.rglob("*.py")) if "triton" in path.read_text(encoding="utf-8")
]


def launches(text: str) -> Iterator[tuple[int, bool]]:
    """(line, whether `**EXACT` is among its arguments) of every launch `kernel[grid](...)`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            given = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None]
            yield node.lineno, "EXACT" in given


def test_no_launch_lets_the_compiler_fuse() -> None:
    """In the folders of all operators."""
    found = {(str(path), *launch) for path in SOURCES for launch in launches((FOLDER / path).read_text("utf-8"))}
    assert not [launch for launch in found if not launch[2]]
    folders = {path.split("/")[0] for path, *_ in found}
    with_kernels = {path.parent.name for path in FOLDER.glob("*/kernel.py")}
    assert with_kernels - {"linear", "row_linear"} < folders and "numeric" in folders  # theirs are in numeric


def test_a_launch_without_it_is_seen() -> None:
    assert list(launches("k[(1,)](x, A=1, **EXACT)\nk[grid](x, num_warps=4)\nk[g](x, **fixed)\nf(x)")) == [
        (1, True), (2, False), (3, False),
    ]  # fmt: skip


@triton.jit
def _product_and_sum(x, y, z):
    tl.store(z, tl.load(x) * tl.load(y) + tl.load(z))


@triton.jit
def _fma(x, y, z):
    tl.store(z, tl.math.fma(tl.load(x), tl.load(y), tl.load(z)))


def fused(kernel: triton.JITFunction, options: dict) -> int:
    """Fused instructions of a kernel of three pointers to fp32."""
    source = ASTSource(fn=kernel, signature=dict.fromkeys(kernel.arg_names, "*fp32"))
    return compile(source, target=TARGET, options=options).asm["ptx"].count("fma.rn.f32")


@pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="compiles")
def test_the_option_keeps_them_apart() -> None:
    """A product and a sum, compiled as Triton does by itself and as they are launched; a written `fma` stays."""
    assert (fused(_product_and_sum, {}), fused(_product_and_sum, EXACT)) == (1, 0)
    assert (fused(_fma, {}), fused(_fma, EXACT)) == (1, 1)
