"""A gate records what it proved, the same bytes each time, and what fails is named and never recorded."""

import json
from pathlib import Path

import pytest
import torch

from skyrl_isoexec.gate import run as runner
from skyrl_isoexec.gate.record import GateError, load, path_of, save, status
from skyrl_isoexec.gate.run import run
from skyrl_isoexec.kernels.rope import cpu


def test_a_run_is_reproducible(records: Path) -> None:
    """And is told line by line; the record holds counts and digests of every check."""
    lines: list[str] = []
    record = run("rope", "cpu", lines.append, records)
    first = path_of("rope", "cpu", records).read_bytes()
    assert run("rope", "cpu", None, records) == record == load("rope", "cpu", records)
    assert path_of("rope", "cpu", records).read_bytes() == first
    assert status("rope", "cpu", records) == "valid"
    assert len(lines) >= len(record.checks) and all(line.endswith("equal") for line in lines)
    assert record.elements > 10**6 and all(len(check["digest"]) == 64 for check in record.checks.values())
    assert any("NaN" in name for name in record.reached) and any("-0" in name for name in record.reached)


def test_a_failing_gate_names_the_check_and_keeps_the_record(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("rope", "cpu", None, records)
    before = path_of("rope", "cpu", records).read_bytes()
    rope, lines = cpu.rope, []
    monkeypatch.setattr(cpu, "rope", lambda x, *rest: rope(x, *rest) + 0.0)  # -0 becomes +0
    with pytest.raises(GateError, match=r"region rope, arch cpu fails:\n  fp32 reference: \d+ of \d+ elements\n"):
        run("rope", "cpu", lines.append, records)
    assert any("DIFFER" in line for line in lines)
    assert path_of("rope", "cpu", records).read_bytes() == before


def test_a_gate_that_breaks_off_is_not_recorded(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "rope", lambda *rest: torch.zeros(0).max())
    with pytest.raises(GateError, match=r"region rope, arch cpu fails:\n  broke off: RuntimeError: max"):
        run("rope", "cpu", None, records)
    assert status("rope", "cpu", records) == "missing"


@pytest.mark.parametrize("kind", ["checks", "reached"])
def test_the_same_key_with_other_bits_is_refused(records: Path, kind: str) -> None:
    """Neither accepted nor overwritten: either the machine or the gate does not repeat."""
    record = run("rope", "cpu", None, records)
    data = json.loads(record.encode())
    name = next(iter(data[kind]))
    data[kind][name] = data["checks"][name] | {"digest": "0" * 64} if kind == "checks" else 12345
    save(type(record)(**data), records)
    before = path_of("rope", "cpu", records).read_bytes()
    with pytest.raises(GateError, match=f"{kind} '{name}' was .*{'0' * 64 if kind == 'checks' else 12345}.*is kept"):
        run("rope", "cpu", None, records)
    assert path_of("rope", "cpu", records).read_bytes() == before


def test_another_key_replaces_the_record(records: Path) -> None:
    record = run("rope", "cpu", None, records)
    old = type(record)(**json.loads(record.encode()) | {"key": {"source": {}, "versions": {}}, "reached": {}})
    save(old, records)
    assert status("rope", "cpu", records) == "stale"
    assert run("rope", "cpu", None, records) == record


def test_a_source_that_changes_meanwhile_is_refused(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = iter(({"source": {"a": "1"}, "versions": {}}, {"source": {"a": "2"}, "versions": {}}))
    monkeypatch.setattr(runner, "present_key", lambda *names: next(keys))
    with pytest.raises(GateError, match="its source changed meanwhile"):
        run("rope", "cpu", None, records)
    assert not path_of("rope", "cpu", records).exists()
