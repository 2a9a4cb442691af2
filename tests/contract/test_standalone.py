"""A contract is read where nothing else is installed: no torch, nor anything but the standard library."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {*sys.stdlib_module_names, "skyrl_isoexec"}:
            raise ImportError(f"not standard: {name}")

sys.meta_path.insert(0, Refuse())
try:
    import torch
except ImportError:
    pass
else:
    raise SystemExit("torch was not refused")
import skyrl_isoexec.contract as contract
raw = sys.stdin.buffer.read()
read = contract.decode(raw)
contract.validate(read)
print(contract.digest(read))
print(sorted(m for m in sys.modules if m.startswith("skyrl_isoexec.") and not m.startswith("skyrl_isoexec.contract")))
"""


def test_reads_a_contract_without_anything_installed(root: Path, contract):
    """In a process of its own, without site-packages; the digest is the one of this process."""
    from skyrl_isoexec.contract import digest, encode

    command = [sys.executable, "-I", "-S", "-c", SCRIPT, str(root)]
    done = subprocess.run(command, input=encode(contract), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == [digest(contract), "[]"]
