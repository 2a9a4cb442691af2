"""Proof of the chunkwise-parallel recurrent gated delta rule: a row's bits are the reference's in every way of it.

Where the tensor core hides the order (`definition` None), results keep a bound; all other checks are the same.
"""

from collections.abc import Mapping
from types import ModuleType

import torch

from skyrl_isoexec.kernels.gdn_cpr import reference, spec
from skyrl_isoexec.kernels.gdn_cpr.cases import HEADS, TENSOR_CORE_HEADS
from skyrl_isoexec.kernels.numeric import gdn_proof
from skyrl_isoexec.kernels.numeric.gdn_requests import Subject
from skyrl_isoexec.kernels.numeric.proof import DTYPES, Proof
from skyrl_isoexec.schedule import Schedule


def prove(
    proof: Proof,
    impl: ModuleType,
    schedule: Schedule,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    definition: ModuleType | None = reference,
) -> None:
    """Collect every check of `impl` in `proof`; `schedule` has the chunk of all but a few shapes."""
    for label, dtype in dtypes.items():
        gdn_proof.prove(
            Subject(
                proof=proof,
                impl=impl,
                schedule=schedule,
                label=label,
                dtype=dtype,
                definition=definition,
                live=None if definition is None else spec.live,
                heads=TENSOR_CORE_HEADS if definition is None else HEADS,
            )
        )
