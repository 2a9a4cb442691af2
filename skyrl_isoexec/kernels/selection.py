"""Which implementations and which order of arithmetic a contract gives to one side of a run."""

from __future__ import annotations

from ..contract import Contract, ContractError
from ..schedule import Schedule

MODEL = "decoder"
"""Region of what the model adds between kernels; no folder here."""

CONSTANT_OPS = {
    "num_leaves": ("logprob", "row_linear"),
    "kv_block": ("attention", "mla"),
    "kv_partition": ("attention", "mla"),
    "gdn_chunk": ("gdn", "gdn_cpr"),
}
"""Field of a schedule -> the operators whose bits it decides."""


def select(contract: Contract, role: str) -> tuple[dict[str, str], Schedule]:
    """({op: name of its file}, schedule) for the cases of `role`: "trainer" or "engine".

    ContractError where one op would need two implementations in one process, or two values of a constant.
    """
    cases = {case.name for case in contract.cases if case.role == role}
    files: dict[str, str] = {}
    constants: dict[str, int] = {}
    known = Schedule().to_dict()
    for entry in contract.composition:
        if not cases & set(entry.cases):
            continue
        op, file = entry.impl.id.split(".")
        if op != MODEL and files.setdefault(op, file) != file:
            raise ContractError(f"composition: the {role} would need both {op}.{files[op]} and {op}.{file}")
        for name, value in entry.constants.items():
            if name in known and constants.setdefault(name, value) != value:
                raise ContractError(f"composition: constant {name} is both {constants[name]} and {value}")
    needed = {name for name, ops in CONSTANT_OPS.items() if files.keys() & set(ops)}
    missing = sorted(needed - constants.keys())
    if missing:
        raise ContractError(f"composition: no entry has the constants {missing}")
    return files, Schedule(**constants)
