"""Build the wheel and the source archive, and check them (`make dist`).

The build is reproducible: it runs twice and must give the same bytes. Archive members get the time of the last commit, and
the source archive is rewritten with sorted names and without user names, because setuptools does neither.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
MAX_WHEEL_BYTES = 4 * 1024**2
MAX_SDIST_BYTES = 8 * 1024**2
# Neither archive may contain test data or benchmark records.
FORBIDDEN_PARTS = {"benchmarks", "tests", ".github", "site"}


def main() -> int:
    """Build twice, compare, check the contents, and leave both files in `dist/`."""
    first, second = build(), build()
    if {path.name: digest(path) for path in first} != {path.name: digest(path) for path in second}:
        sys.stderr.write("dist: two builds of the same commit differ. Look for time stamps or file names in them.\n")
        return 1
    problems = [problem for path in first for problem in check_archive(path)]
    sys.stderr.writelines(f"dist: {problem}\n" for problem in problems)
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for path in first:
        shutil.copy(path, DIST)
        sys.stdout.write(f"{path.name}  {path.stat().st_size:,} bytes  sha256 {digest(path)}\n")
    check = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, DIST.iterdir())], check=False)
    return 1 if problems else check.returncode


def build() -> list[Path]:
    """Build a wheel and a source archive from the committed files, in a fresh folder."""
    folder = Path(tempfile.mkdtemp(prefix="knowgate-dist-"))
    source = folder / "source"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
    seconds = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "out"), str(source)],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "SOURCE_DATE_EPOCH": seconds, "PYTHONHASHSEED": "0"},
    )
    for path in (folder / "out").glob("*.tar.gz"):
        normalize_sdist(path, int(seconds))
    return sorted((folder / "out").iterdir())


def normalize_sdist(path: Path, seconds: int) -> None:
    """Rewrite a source archive with sorted members, one time stamp, fixed modes and no owners."""
    with tarfile.open(path) as archive:
        members = sorted((member for member in archive if member.isfile()), key=lambda member: member.name)
        contents = [(member, archive.extractfile(member).read()) for member in members]  # type: ignore[union-attr]
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=seconds) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member, _ in contents:
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            member.pax_headers = {}
        for member, content in contents:
            with tempfile.SpooledTemporaryFile() as buffer:
                buffer.write(content)
                buffer.seek(0)
                archive.addfile(member, buffer)


def check_archive(path: Path) -> list[str]:
    """Return what is wrong with an archive: its size, or files that do not belong in it."""
    limit = MAX_WHEEL_BYTES if path.suffix == ".whl" else MAX_SDIST_BYTES
    problems = []
    if path.stat().st_size > limit:
        problems.append(f"{path.name} has {path.stat().st_size:,} bytes; the limit is {limit:,}")
    for name in list_members(path):
        if FORBIDDEN_PARTS & set(Path(name).parts):
            problems.append(f"{path.name} contains {name}, which users do not need")
    return problems


def list_members(path: Path) -> list[str]:
    """List the names of an archive's members."""
    if path.suffix == ".whl":
        return zipfile.ZipFile(path).namelist()
    with tarfile.open(path) as archive:
        return archive.getnames()


def digest(path: Path) -> str:
    """Return the SHA-256 digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
