"""A fitted arbiter on disk: `arbiter.json`, `weights.safetensors`, a card to read, perhaps an adapter. Never pickle.

Written whole or not at all; read through one door, as fitted gates are: what `arbiter.json` says is checked field by
field, and every file but the card must be the one that was written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from knowgate.arbiters.manifest import read_arbiter_manifest
from knowgate.doors import read_json, user_path
from knowgate.errors import ArtefactError, BadInput
from knowgate.files import check_replaceable, new_folder, sha256_text, write_json, write_text
from knowgate.folders import check_digests, check_folder, file_digests
from knowgate.gates import CARD, Artefact, Tensors, is_artefact, unusable

VERSION = 1
ARBITER_MANIFEST, WEIGHTS = "arbiter.json", "weights.safetensors"
ARBITER_KIND = "a fitted arbiter"


@dataclass(frozen=True)
class ArbiterArtefact(Artefact):
    """A fitted arbiter's manifest and weights, kept as a gate's are."""

    kind: ClassVar[str] = "arbiter"


def _refusal(folder: Path, problem: str) -> ArtefactError:
    return unusable(ArbiterArtefact.kind, folder, problem)


def is_arbiter(path: str | Path) -> bool:
    return is_artefact(path, ARBITER_MANIFEST)


def read_arbiter(path: str | Path) -> ArbiterArtefact:
    """Load and check a fitted arbiter."""
    if not is_arbiter(path):
        raise ArtefactError(
            f"'{path}' is not a fitted arbiter: it has no {ARBITER_MANIFEST}. Make one: knowgate fit arbiter"
        )
    folder = user_path(path)
    check_folder(folder, lambda problem: _refusal(folder, problem))
    manifest = _manifest(folder)
    check_digests(folder, manifest["files"], lambda problem: _refusal(folder, problem))
    return ArbiterArtefact(folder, manifest, _tensors(folder))


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_json(folder / ARBITER_MANIFEST)
        if manifest["version"] != VERSION:
            raise _refusal(folder, f"it has format {str(manifest['version'])[:40]}, this knowgate reads {VERSION}")
        if manifest["checksum"] != checksum(manifest):
            raise _refusal(folder, f"{ARBITER_MANIFEST} was edited by hand")
        read_arbiter_manifest(manifest, ARBITER_MANIFEST)
    except (BadInput, KeyError, TypeError) as error:
        raise _refusal(folder, f"{ARBITER_MANIFEST} is broken ({error})") from None
    return dict(manifest)


def _tensors(folder: Path) -> Tensors:
    file = folder / WEIGHTS
    try:
        tensors: Tensors = load(file.read_bytes()) if file.is_file() else {}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:  # the latter for number types that numpy lacks
        raise _refusal(folder, f"its weights cannot be read: {error}") from None
    if any(not np.isfinite(block).all() for block in tensors.values()):
        raise _refusal(folder, "its weights hold NaN")
    return tensors


def write_arbiter(
    path: Path, manifest: Mapping[str, Any], tensors: Tensors, card: str, files: Mapping[str, bytes] | None = None
) -> None:
    """Save a fitted arbiter; an earlier one in the same place is replaced as a whole, anything else is left alone."""
    check_replaceable(path, ARBITER_MANIFEST, ARBITER_KIND)
    with new_folder(path) as folder:
        if tensors:
            (folder / WEIGHTS).write_bytes(save({name: np.ascontiguousarray(block) for name, block in tensors.items()}))
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        write_text(folder / CARD, card)
        full = {**manifest, "version": VERSION, "files": file_digests(folder, leave=(ARBITER_MANIFEST, CARD))}
        write_json(folder / ARBITER_MANIFEST, {**full, "checksum": checksum(full)})


def checksum(manifest: Mapping[str, Any]) -> str:
    """Of everything that decides how the arbiter behaves; it is its fingerprint."""
    parts = [f"{key}={json.dumps(manifest[key])}" for key in sorted(manifest) if key != "checksum"]
    return sha256_text(*parts)[:16]
