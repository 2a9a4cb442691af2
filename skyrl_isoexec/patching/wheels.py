"""Pinned wheels: fetched by hash through pip, read without installing them."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.record import content_hash, read_record, record_digest
from skyrl_isoexec.patching.upstreams import Build, Upstream


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel file whose hash has been checked."""

    upstream: Upstream
    """Its pin."""
    build: Build
    """Which of the pinned wheels it is."""
    path: Path
    """The file."""

    def record(self) -> str:
        """The text of its RECORD; refuses one that differs from the pinned digest."""
        with zipfile.ZipFile(self.path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
            text = archive.read(name).decode()
        found = record_digest(read_record(text, self.upstream.root))
        if found != self.build.record_sha256:
            raise PatchRefusal(
                what=f"record_sha256 of {self.build.wheel} is {found}, pinned is {self.build.record_sha256}",
                where="patches/upstreams.toml",
                mend="correct the pin: the wheel itself has the pinned sha256",
            )
        return text

    def recorded(self) -> dict[str, str]:
        """Path to SHA-256 of the files under the package's root."""
        return read_record(self.record(), self.upstream.root)

    def read(self, paths: list[str]) -> dict[str, bytes | None]:
        """Contents of the paths, checked against RECORD; None for those that the wheel does not hold."""
        recorded = self.recorded()
        contents: dict[str, bytes | None] = {}
        with zipfile.ZipFile(self.path) as archive:
            for path in paths:
                contents[path] = content = archive.read(path) if path in recorded else None
                if content is not None and content_hash(content) != recorded[path]:
                    raise PatchRefusal(
                        what=f"{path} differs from its hash in the wheel's own RECORD",
                        where=str(self.path),
                        mend="the pin names a broken wheel; pin another",
                    )
        return contents


def fetch(upstream: Upstream, build: Build, repository: Path, wheel_dir: Path | None = None) -> Wheel:
    """The wheel from `wheel_dir`, else from the repository's cache, else from the package index; checked by hash."""
    cache = repository / ".cache" / "wheels"
    path = (wheel_dir or cache) / build.wheel
    if not path.is_file():
        if wheel_dir is not None:
            raise PatchRefusal(what=f"no {build.wheel}", where=str(wheel_dir), mend="put it there, or leave the option")
        _download(upstream, build, path)
    with open(path, "rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != build.sha256:
        raise PatchRefusal(
            what=f"{build.wheel} has sha256 {found}, pinned is {build.sha256}",
            where=str(path),
            mend="remove the file and fetch it again; if it differs again, do not use it",
        )
    return Wheel(upstream=upstream, build=build, path=path)


def _download(upstream: Upstream, build: Build, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as folder:
        pins = Path(folder) / "pins.txt"
        pins.write_text(f"{build.distribution}=={upstream.version} --hash=sha256:{build.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:",
                   "--dest", folder, "--requirement", str(pins)]  # fmt: skip
        if not build.fits_this_python():
            command += ["--python-version", str(build.python)]
        print(f"fetching {build.wheel}", file=sys.stderr, flush=True)
        done = subprocess.run(command, stdout=2)
        if done.returncode != 0 or not (Path(folder) / build.wheel).is_file():
            raise PatchRefusal(
                what=f"pip could not fetch {build.distribution} {upstream.version} by its hash {build.sha256}",
                where="the package index that pip is configured for",
                mend="read pip's message above; without a network, give the wheel with --wheel-dir",
            )
        os.replace(Path(folder) / build.wheel, path)
