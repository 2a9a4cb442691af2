"""What the assembler makes of the Hopper kernels: descriptors of shared memory keep their words apart, without a GPU.

A descriptor is 64 bits: an address in its low word, strides in the other. The step along a product's depth is an
addition to both. ptxas 12.8 can take the address for the strides' word too, which a wider value had when registers were
given out: the tensor core then reads other memory, and nothing but bits shows it.
"""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="compiles")

from skyrl_isoexec.kernels.gdn import triton_outputs, triton_step  # noqa: E402
from skyrl_isoexec.kernels.gdn_cpr import triton_recur  # noqa: E402
from skyrl_isoexec.kernels.numeric import sm90, sm90_gdn_chunk  # noqa: E402

FOLDER = sm90.ASSEMBLER.parent
SHAPES = {
    "C": 64, "DK": 128, "DV": 128, "HK": 2, "HV": 4, "W": 4, "BV": 32, "PAGE": 128, "PAGED": True, "ALONE": True,
}  # fmt: skip
FLOATS = ("decay", "beta", "gate", "blocks", "recurrent")
NUMBERS = ("base", "owner", "query_start", "seq_lens", "table")
KERNELS = {
    "prepare": (sm90_gdn_chunk.prepare, {"DK": 16, "HK": 1, "HV": 2}),
    "attend": (triton_outputs.attend, {}),
    "step": (triton_step.step, {}),
    "close of cpr": (triton_recur.close, {}),
}
ADDED = re.compile(r"UIADD3\.X UR\d+, (UR\d+), -?0x[0-9a-f]{2,}, URZ, UP\d")
"""The high word of an addition of 64 bits, with a constant."""


def type_of(name: str) -> str:
    """Of an argument, by its name."""
    if name in NUMBERS or name in FLOATS:
        return "*i32" if name in NUMBERS else "*fp32"
    if name == "scale":
        return "fp32"
    return "i32" if name.startswith("num_") else "i64" if name.endswith("_stride") else "*bf16"


@pytest.fixture(scope="module", params=KERNELS)
def ptx(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel as Triton hands it to the assembler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel, changes = KERNELS[request.param]
    constants = {name: value for name, value in (SHAPES | changes).items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    whole = [["tt.divisibility", 16]]
    kinds = {
        (i,): whole
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith("_stride")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=kinds)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **sm90.EXACT})
    path = tmp_path_factory.mktemp("ptx") / "kernel.ptx"
    path.write_text(re.sub(r"(?m)^\.version .*", ".version 8.7", made.asm["ptx"]))  # which both assemblers take
    return path


def mixed_words(ptx: Path, assembler: str) -> tuple[list[str], int]:
    """(additions whose high word is not known to be zero, additions seen) in the code for Hopper."""
    cubin = ptx.with_suffix(".cubin")
    subprocess.run([FOLDER / assembler, "-arch=sm_90a", ptx, "-o", cubin], check=True, capture_output=True)
    text = subprocess.run([FOLDER / "nvdisasm", cubin], check=True, capture_output=True, text=True).stdout
    last: dict[str, str] = {}
    wrong, seen = [], 0
    for code in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", text):
        if added := ADDED.match(code):
            seen += 1
            if not re.match(r"UMOV UR\d+, URZ", last.get(added[1], "")):
                wrong.append(code)
        if (written := re.match(r"U[\w.]+ (?:UP\d, )?UR(\d+)", code)) or (written := re.match(r"S2UR UR(\d+)", code)):
            first = int(written[1])
            for register in range(first, first + 1 + (".64" in code.split()[0])):
                last[f"UR{register}"] = code
    return wrong, seen


def test_words_are_kept_apart(ptx: Path) -> None:
    """By the assembler that is chosen; whatever kernel, there are descriptors that step."""
    wrong, seen = mixed_words(ptx, sm90.ASSEMBLER.name)
    assert seen and not wrong


def test_the_hazard_exists_and_is_seen(ptx: Path) -> None:
    """In the code of the other assembler, which Triton would take."""
    assert mixed_words(ptx, "ptxas")[0]


def test_it_is_chosen() -> None:
    """Whatever is compiled from now on, also by other modules of the process."""
    from triton.backends.nvidia.compiler import get_ptxas, get_ptxas_version

    assert Path(get_ptxas(90).path) == sm90.ASSEMBLER and get_ptxas(90).version == sm90.ASSEMBLER_VERSION
    assert f"release {sm90.ASSEMBLER_VERSION}" in get_ptxas_version(90)


@pytest.mark.parametrize(
    "version, message", [("99.9", "is of version 12.9, not of version 99.9"), (None, "is missing")]
)
def test_another_assembler_is_refused(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that is not there, or not the one that was looked at."""
    if version is None:
        monkeypatch.setattr(sm90, "ASSEMBLER", tmp_path / "ptxas-blackwell")
    else:
        monkeypatch.setattr(sm90, "ASSEMBLER_VERSION", version)
    with pytest.raises(RuntimeError, match=message):
        sm90.choose_assembler()
