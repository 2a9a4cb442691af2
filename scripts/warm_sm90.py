#!/usr/bin/env python3
"""Fill Triton's cache on all cores with what the gates of sm90 need: compiling takes longer than proving.

    python scripts/warm_sm90.py [REGION...]

Parts of the gates run at the same time in processes of their own; what they find is thrown away. The gates themselves
run afterwards, whole, and say what differs.
"""

import importlib
import itertools
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from skyrl_isoexec.gate import decoder, ways  # noqa: E402
from skyrl_isoexec.gate.device import OnDevice  # noqa: E402
from skyrl_isoexec.gate.models import DECODERS, variants  # noqa: E402
from skyrl_isoexec.gate.run import SCHEDULE  # noqa: E402
from skyrl_isoexec.kernels.numeric.proof import Proof  # noqa: E402

BF16 = torch.bfloat16
SLICES = 3
"""Jobs that share the tiles of a shape."""
Job = tuple[str, str, object]
"""(region, function of its gate, which part of its inputs or which model)."""


def jobs() -> list[Job]:
    """The longest first."""
    gate = importlib.import_module("skyrl_isoexec.kernels.attention.gate")
    made: list[Job] = [("attention", "_tensor_core", shape) for shape in reversed(gate.TENSOR_CORE_SHAPES)]
    for op, leaves in (("row_linear", (1, 2, 4, 8)), ("linear", (1,))):
        gate = importlib.import_module(f"skyrl_isoexec.kernels.{op}.gate")
        parts = itertools.product(leaves, range(len(gate.TILED)), range(SLICES))
        made += [(op, "_tensor_core", part) for part in parts]
    made += [("row_linear", "_tensor_core", "whole"), ("linear", "_tensor_core", "whole")]
    made += [("linear", "_tensor_core", "some")]
    parts = ("degrees", "decode", "prefill", "trainer", "backward")
    made += [(region, part, name) for region in DECODERS for name, _, _ in variants(region) for part in parts]
    made += [("attention", name, None) for name in ("_tensor_core", "_pages", "_cuts", "_neighbours", "_batch")]
    made += [("attention", "_sequences", None), ("attention", "_long_prefills", None)]
    for op in ("linear", "row_linear"):
        names = importlib.import_module(f"skyrl_isoexec.kernels.{op}.cases").cases(BF16)
        made += [(op, "cases", name) for name in names if name != "no rows"]
    return made


def products(op: str, part: object, proof: Proof, kernel: OnDevice) -> None:
    """Tiles of the large shapes, or what is done with one case."""
    gate = importlib.import_module(f"skyrl_isoexec.kernels.{op}.gate")
    made = gate.cases(BF16)
    gate.cases = lambda dtype: {part: made[part]} if part in made else {}
    if part in made:
        gate.TILED = ()
    elif isinstance(part, tuple):
        leaves, shape, piece = part
        gate.LEAVES, gate.TILED, table = (leaves,), (gate.TILED[shape],), kernel.TABLE
        kernel.TABLE = SimpleNamespace(tiles=lambda *given: table.tiles(*given)[piece::SLICES])
    elif op == "row_linear":
        gate.LEAVES = ()
        gate.prove(proof, kernel, SCHEDULE, {"bf16": BF16}, None)
        return
    if op == "linear":
        gate._tensor_core(proof, kernel, "bf16", BF16)
    elif part in made:
        gate._reference(proof, kernel, gate.Leaves(kernel), lambda _: None, "bf16", BF16)
    else:
        gate._tensor_core(proof, kernel, gate.Leaves(kernel), "bf16", BF16)


def attention(name: str, part: object, proof: Proof, kernel: OnDevice) -> None:
    """One function of the gate; `_tensor_core` for one shape, or for none and all kinds."""
    gate = importlib.import_module("skyrl_isoexec.kernels.attention.gate")
    gate.TENSOR_CORE_SHAPES = () if part is None else (part,)
    if name == "_pages":
        gate._pages(proof, kernel, SCHEDULE, "bf16", BF16, True)
        return
    if part is not None:
        gate.cases.KINDS, gate.LONG_SHAPES = {}, ()
    getattr(gate, name)(proof, kernel, SCHEDULE, "bf16", BF16)


def whole_model(region: str, name: str, model: str, proof: Proof) -> None:
    """One way of computing log-probabilities of one model."""
    made = decoder.on_tensor_cores(region, "kernel", SCHEDULE)
    config, kernels = next(pair for label, *pair in made if label == model)
    make, sequences = ways.builder(config, kernels, "cuda"), ways.token_ids(config, decoder.LENGTHS, "cuda")
    if name == "trainer":
        ways.trainer(make(), sequences, grad=False)
    elif name == "backward":
        decoder._recomputation(proof, "warm", make(), sequences)
    elif name == "degrees":
        decoder._degrees(proof, "warm", make, sequences, ways.trainer(make(), sequences, grad=True))
    else:
        steps = ways.prefill_steps if name == "prefill" else ways.decode_steps
        ways.engine(make(), sequences, steps(sequences))


def run(job: Job) -> tuple[Job, float]:
    """Do one job; whatever fails is reported by the gate."""
    region, name, part = job
    begin, proof = time.monotonic(), Proof()
    torch.set_num_threads(1)
    try:
        if region in DECODERS:
            whole_model(region, name, part, proof)
        else:
            kernel = OnDevice(importlib.import_module(f"skyrl_isoexec.kernels.{region}.kernel"), "cuda")
            prepare = attention if region == "attention" else products
            prepare(name if region == "attention" else region, part, proof, kernel)
    except Exception as error:
        print(f"{job}: {error!r}"[:200], flush=True)
    return job, time.monotonic() - begin


def main() -> int:
    begin, chosen = time.monotonic(), sys.argv[1:]
    work = [job for job in jobs() if not chosen or job[0] in chosen]
    workers = max(1, min(15, (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(run, job) for job in work]):
            job, seconds = done.result()
            print(f"{seconds:5.0f} s {job}", flush=True)
    print(f"{len(work)} parts in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
