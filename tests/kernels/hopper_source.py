"""What a Hopper kernel of the gated delta rules is compiled from without a GPU: types by name, and shapes."""

from collections.abc import Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
SHAPES = {
    "C": 64, "DK": 128, "DV": 128, "HK": 2, "HV": 4, "W": 4, "BV": 32, "PAGE": 128, "PAGED": True, "RESUME": True,
    "STAGES": 2, "ALONE": True, "CHANNELS": 128,
}  # fmt: skip
"""Constants by name, of those kernels that have them."""
FLOATS = ("decay", "beta", "gate", "blocks", "recurrent", "steps")
NUMBERS = ("base", "owner", "query_start", "seq_lens", "table")


def type_of(name: str) -> str:
    """Of an argument, by its name."""
    if name in NUMBERS or name in FLOATS:
        return "*i32" if name in NUMBERS else "*fp32"
    if name == "scale":
        return "fp32"
    return "i32" if name.startswith("num_") else "i64" if name.endswith("_stride") else "*bf16"


def source_of(kernel: triton.JITFunction, changes: Mapping[str, object] = {}) -> ASTSource:
    """A kernel with `SHAPES` but for the changes, and tensors that are aligned as an allocator aligns them."""
    constants = {name: value for name, value in (SHAPES | dict(changes)).items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    whole = [["tt.divisibility", 16]]
    kinds = {
        (i,): whole for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*" or name.endswith("_stride")
    }
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=kinds)
