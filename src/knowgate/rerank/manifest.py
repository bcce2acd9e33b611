"""An aligned reranker on disk: a cross-encoder's files, `reranker.json`, a card to read. Never pickle.

Knows what the manifest says and whether the weights are those it was written for; not how any of it came about.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from knowgate.doors import read_json
from knowgate.errors import ArtefactError, BadInput, WeightsError
from knowgate.files import sha256_file, sha256_text

VERSION = 1
KEPT = (".json", ".safetensors", ".txt", ".model", ".md", ".jinja")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MANIFEST, WEIGHTS = "reranker.json", "model.safetensors"
BASE = "base"  # the cross-encoder before alignment, where it was made here


def is_aligned(path: str | Path) -> bool:
    return (Path(path).expanduser() / MANIFEST).is_file()


def check_files(path: str | Path) -> None:
    """Refuse what could run code when it is loaded: a folder of weights holds safetensors and text, nothing else."""
    folder = Path(path).expanduser()
    if not any(folder.glob("*.safetensors")):
        found = sorted(item.name for item in folder.iterdir() if item.suffix in PICKLES)
        holds = f" (only {', '.join(found)}, which is pickle)" if found else ""
        raise WeightsError(f"the reranker '{path}' cannot be loaded: it has no safetensors weights{holds}.")
    foreign = sorted(str(item.relative_to(folder)) for item in folder.rglob("*") if _is_foreign(item))
    if is_aligned(folder) and foreign:
        raise ArtefactError(
            f"the reranker '{path}' holds '{foreign[0]}', which knowgate did not write there. Fit it again."
        )


def _is_foreign(item: Path) -> bool:
    return item.is_file() and item.suffix not in KEPT


def read_manifest(path: str | Path) -> Mapping[str, Any]:
    """The manifest of an aligned reranker, checked against its weights."""
    folder = Path(path).expanduser()
    if not is_aligned(folder):
        raise ArtefactError(
            f"'{path}' is not an aligned reranker: it has no {MANIFEST}. Make one: knowgate fit reranker"
        )
    try:
        manifest: Mapping[str, Any] = read_json(folder / MANIFEST)
        found, wanted = manifest["version"], manifest["weights_sha256"]
    except (BadInput, KeyError, TypeError) as error:
        raise ArtefactError(f"{folder / MANIFEST} is broken ({error}). Fit the reranker again.") from None
    if found != VERSION:
        raise ArtefactError(f"the reranker '{path}' has format {found}, this knowgate reads {VERSION}. Fit it again.")
    if not (folder / WEIGHTS).is_file() or sha256_file(folder / WEIGHTS) != wanted:
        raise ArtefactError(f"the weights of the reranker '{path}' were changed or damaged. Fit it again.")
    return manifest


def weights_fingerprint(path: str | Path) -> str:
    """Of the weights of a saved cross-encoder, wherever it lies."""
    files = sorted(Path(path).expanduser().glob("*.safetensors"))
    if not files:
        raise WeightsError(f"'{path}' holds no safetensors weights.")
    return sha256_text(*map(sha256_file, files))[:16]


def other_llm(path: str | Path, model: str, fingerprint: str) -> str | None:
    """What to say of a reranker that was aligned to another LLM: it still ranks, but not for this one."""
    if not is_aligned(path) or (made := read_manifest(path)["aligned_to"])["model_fingerprint"] == fingerprint:
        return None
    return f"The reranker '{path}' was aligned to {made['model']}, not to {model}."
