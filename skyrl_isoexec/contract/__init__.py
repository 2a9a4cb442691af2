"""The execution contract: schema, bytes, identities, validation and comparison. Standard library only, no torch."""

from skyrl_isoexec.contract.canonical import canonical, parse
from skyrl_isoexec.contract.cases import CASE_NAMES, CASES, CONSTRAINTS, ROWS, Case
from skyrl_isoexec.contract.claims import AXES, EVENTS, STATES, Claims, StateClaim, Tolerance, TopologyClaim
from skyrl_isoexec.contract.codec import decode, digest, encode, plain
from skyrl_isoexec.contract.diff import diff
from skyrl_isoexec.contract.errors import ContractError, Violation
from skyrl_isoexec.contract.facts import differences
from skyrl_isoexec.contract.identity import identities, moves, seal
from skyrl_isoexec.contract.schema import ARCHES, SCHEMA_VERSION, Contract, Discharge, Entry, Identities, Impl, Model
from skyrl_isoexec.contract.validate import validate
from skyrl_isoexec.contract.values import FrozenMapping, float_bits, from_bits

__all__ = [
    "ARCHES",
    "AXES",
    "CASES",
    "CASE_NAMES",
    "CONSTRAINTS",
    "Case",
    "Claims",
    "Contract",
    "ContractError",
    "Discharge",
    "EVENTS",
    "Entry",
    "FrozenMapping",
    "Identities",
    "Impl",
    "Model",
    "ROWS",
    "SCHEMA_VERSION",
    "STATES",
    "StateClaim",
    "Tolerance",
    "TopologyClaim",
    "Violation",
    "canonical",
    "decode",
    "diff",
    "differences",
    "digest",
    "encode",
    "float_bits",
    "from_bits",
    "identities",
    "moves",
    "parse",
    "plain",
    "seal",
    "validate",
]
