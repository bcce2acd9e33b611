"""An aligned reranker on disk: a cross-encoder's files, `reranker.json`, a card to read. Never pickle.

Knows what the manifest says and whether the weights are those it was written for; not how any of it came about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knowgate.doors import read_json, user_path
from knowgate.errors import ArtefactError, BadInput, WeightsError
from knowgate.files import sha256_file, sha256_text
from knowgate.folders import PICKLES, check_digests, check_folder
from knowgate.typed import read_record

VERSION = 1
KEPT = (".json", ".safetensors", ".txt", ".model", ".md", ".jinja")
MANIFEST, WEIGHTS = "reranker.json", "model.safetensors"
CARD = "README.md"
FINGERPRINT = "model_fingerprint"
BASE = "base"  # the cross-encoder before alignment, where it was made here


@dataclass(frozen=True)
class RerankerRecord:
    """`files` are the digests of all files but the card; rerankers of earlier versions have none."""

    version: int
    weights_sha256: str
    base: str = ""
    aligned_to: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    reads_question: bool = True


def is_aligned(path: str | Path) -> bool:
    return (user_path(path) / MANIFEST).is_file()


def check_files(path: str | Path) -> None:
    """Refuse what could run code when it is loaded: a folder of weights holds safetensors and text, nothing else."""
    folder = user_path(path)
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
    folder = user_path(path)
    if not is_aligned(folder):
        raise ArtefactError(
            f"'{path}' is not an aligned reranker: it has no {MANIFEST}. Make one: knowgate fit reranker"
        )
    try:
        manifest: Mapping[str, Any] = read_json(folder / MANIFEST)
        record = read_record(RerankerRecord, manifest, MANIFEST, others=True)
    except BadInput as error:
        raise ArtefactError(f"{folder / MANIFEST} is broken ({error}). Fit the reranker again.") from None
    if record.version != VERSION:
        raise ArtefactError(
            f"the reranker '{path}' has format {record.version}, this knowgate reads {VERSION}. Fit it again."
        )

    def refusal(problem: str) -> ArtefactError:
        return ArtefactError(f"the reranker '{path}' cannot be used: {problem}. Fit it again.")

    check_folder(folder, refusal)
    if not (folder / WEIGHTS).is_file() or sha256_file(folder / WEIGHTS) != record.weights_sha256:
        raise ArtefactError(f"the weights of the reranker '{path}' were changed or damaged. Fit it again.")
    check_digests(folder, record.files, refusal)
    return manifest


def weights_fingerprint(path: str | Path) -> str:
    """Of the weights of a saved cross-encoder, wherever it lies."""
    files = sorted(user_path(path).glob("*.safetensors"))
    if not files:
        raise WeightsError(f"'{path}' holds no safetensors weights.")
    return sha256_text(*map(sha256_file, files))[:16]


def other_llm(path: str | Path, model: str, fingerprint: str) -> str | None:
    """What to say of a reranker that was aligned to another LLM: it still ranks, but not for this one."""
    if not is_aligned(path) or (made := read_manifest(path).get("aligned_to", {})).get(FINGERPRINT) == fingerprint:
        return None
    return f"The reranker '{path}' was aligned to {made.get('model', 'another LLM')}, not to {model}."
