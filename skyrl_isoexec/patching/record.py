"""RECORD, the list of files and hashes inside every wheel, as the definition of "pristine".

An installer copies the rows of the package's own files unchanged and adds rows of its own (byte code, INSTALLER). The
digest therefore covers only files under the package's root: equal digests mean the same wheel contents.
"""

import base64
import csv
import hashlib
import io
from collections.abc import Mapping


def content_hash(content: bytes) -> str:
    """Hex SHA-256, the name of a file's content everywhere in this package."""
    return hashlib.sha256(content).hexdigest()


def read_record(text: str, root: str) -> dict[str, str]:
    """Path to hex SHA-256 for every hashed file under `root/`; byte code is not counted."""
    recorded = {}
    for row in csv.reader(io.StringIO(text)):
        if len(row) < 2 or not row[0].startswith(f"{root}/") or row[0].endswith(".pyc"):
            continue
        algorithm, _, value = row[1].partition("=")
        if algorithm == "sha256" and value:
            recorded[row[0]] = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    return recorded


def record_digest(recorded: Mapping[str, str]) -> str:
    """Hex SHA-256 of the sorted rows "path,sha256=<url-safe base64>", one a line, as they stand in a RECORD."""
    lines = []
    for path, value in sorted(recorded.items()):
        encoded = base64.urlsafe_b64encode(bytes.fromhex(value)).rstrip(b"=").decode()
        lines.append(f"{path},sha256={encoded}\n")
    return content_hash("".join(lines).encode())
