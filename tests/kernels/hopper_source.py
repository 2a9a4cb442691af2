"""What a Hopper kernel is compiled from without a GPU, types by name and shapes, and what the assembler made of it."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from skyrl_isoexec.kernels.attention import warp_groups
from skyrl_isoexec.kernels.mla import warp_groups as latent_warp_groups
from skyrl_isoexec.kernels.numeric import sm90

FOLDER = sm90.ASSEMBLER.parent
TARGET = GPUTarget("cuda", 90, 32)
SHAPES = {
    "C": 64, "DK": 128, "DV": 128, "HK": 2, "HV": 4, "W": 4, "BV": 32, "PAGE": 128, "PAGED": True, "RESUME": True,
    "STAGES": 2, "ALONE": True, "CHANNELS": 128, "SPAN": 16,
}  # fmt: skip
"""Constants by name, of those kernels of the gated delta rules that have them."""
ADDED = re.compile(r"UIADD3\.X UR\d+, (UR\d+), -?0x[0-9a-f]{2,}, URZ, UP\d")
"""The high word of an addition of 64 bits, with a constant."""
FLOATS = ("decay", "beta", "gate", "blocks", "recurrent", "steps", "g")
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


def gluon_source_of(kernel: triton.JITFunction, changes: Mapping[str, object] = {}) -> GluonASTSource:
    """`source_of` a kernel that is written in Gluon."""
    plain = source_of(kernel, changes)
    return GluonASTSource(kernel, plain.signature, plain.constants, plain.attrs)


def long_prefill_source(head_dim: int, page_size: int, stages: tuple[int, int], is_held: bool) -> GluonASTSource:
    """Attention's tile of long prefills, of four query heads for a key-value head."""
    constants = {
        "D": head_dim, "GROUP": 4, "BQ": 32, "BKV": 64, "PART": 512, "PAGE": page_size, "K_STAGES": stages[0],
        "V_STAGES": stages[1], "LSE": not page_size, "HELD": is_held,
    }  # fmt: skip
    kinds = dict.fromkeys(("keys", "values"), copied(head_dim)) | dict.fromkeys(("q", "out"), "*bf16")
    kinds |= dict.fromkeys(("lse", "scratch"), "*fp32")
    return gluon_source(warp_groups.attend, constants, kinds)


def latent_source(page_size: int, mode: int, num_heads: int = 20) -> GluonASTSource:
    """Latent attention's tile of groups of warps, for what a program's items are."""
    constants = {
        "N": num_heads, "H": 256, "R": 64, "PART": 512, "PAGE": page_size, "MODE": mode, "LSE": not page_size,
        "BY_TOKEN": True,
    }  # fmt: skip
    kinds = dict.fromkeys(("q_latents", "latents"), copied(256)) | dict.fromkeys(("q_rotated", "rotated"), copied(64))
    kinds |= dict.fromkeys(("lse", "scratch", "maxima", "sums", "accs"), "*fp32") | {"out": "*bf16"}
    return gluon_source(latent_warp_groups.attend, constants, kinds)


def copied(columns: int) -> str:
    """The type of what the copy engine needs to read 64 rows of some columns."""
    block = [64, columns]
    return f"tensordesc<bf16{block},{gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)!r}>"


def gluon_source(kernel: triton.JITFunction, constants: dict[str, object], kinds: dict[str, str]) -> GluonASTSource:
    """A kernel in Gluon: kinds of its arguments, but for tables of numbers, a scale and counts."""
    kinds = dict.fromkeys(("table", "query_start", "seq_lens"), "*i32") | {"scale": "fp32"} | kinds
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n][0] == "*"}
    return GluonASTSource(kernel, signature, constants, aligned)


def disassembled(cubin: Path) -> list[str]:
    """Every instruction, without its predicate."""
    text = subprocess.run([FOLDER / "nvdisasm", cubin], check=True, capture_output=True, text=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", text)


def mixed_words(cubin: Path) -> tuple[list[str], int]:
    """(additions whose high word is not known to be zero, additions seen) in the code for Hopper."""
    last: dict[str, str] = {}
    wrong, seen = [], 0
    for code in disassembled(cubin):
        if added := ADDED.match(code):
            seen += 1
            if not re.match(r"UMOV UR\d+, URZ", last.get(added[1], "")):
                wrong.append(code)
        if (written := re.match(r"U[\w.]+ (?:UP\d, )?UR(\d+)", code)) or (written := re.match(r"S2UR UR(\d+)", code)):
            first = int(written[1])
            for register in range(first, first + 1 + (".64" in code.split()[0])):
                last[f"UR{register}"] = code
    return wrong, seen
