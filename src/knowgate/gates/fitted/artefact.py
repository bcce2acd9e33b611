"""A fitted gate on disk: `gate.json`, `weights.safetensors`, a card to read. Never pickle.

Written whole or not at all; read with a check that nothing was changed by hand.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from knowgate.doors import read_json, user_path
from knowgate.errors import ArtefactError, BadInput
from knowgate.files import check_replaceable, new_folder, sha256_text, write_json, write_text

VERSION = 1
MANIFEST, WEIGHTS, CARD, SEEN = "gate.json", "weights.safetensors", "README.md", "seen.txt"
ALWAYS = -1.0  # a threshold below every need: the gate retrieves for each question
KIND = "a fitted gate"
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Artefact:
    """A fitted gate's manifest and weights. `path` is where extra files (an adapter, say) lie."""

    path: Path
    manifest: Mapping[str, Any]
    tensors: Tensors = field(default_factory=dict, repr=False)

    @property
    def options(self) -> Mapping[str, Any]:
        options: Mapping[str, Any] = self.manifest["options"]
        return options


def is_artefact(path: str | Path) -> bool:
    return (user_path(path) / MANIFEST).is_file()


def read_artefact(path: str | Path) -> Artefact:
    """Load and check a fitted gate."""
    folder = user_path(path)
    if not is_artefact(folder):
        raise ArtefactError(f"'{path}' is not a fitted gate: it has no {MANIFEST}. Make one: knowgate fit")
    manifest = _manifest(folder)
    data = (folder / WEIGHTS).read_bytes() if (folder / WEIGHTS).is_file() else b""
    if hashlib.sha256(data).hexdigest() != manifest["weights_sha256"]:
        raise ArtefactError(f"the weights of the fitted gate '{path}' were changed or damaged. Fit it again.")
    try:
        tensors = load(data) if data else {}
    except SafetensorError as error:
        raise ArtefactError(f"the weights of the fitted gate '{path}' cannot be read: {error}.") from None
    if any(not np.isfinite(block).all() for block in tensors.values()):
        raise ArtefactError(f"the weights of the fitted gate '{path}' hold NaN. Fit it again.")
    return Artefact(folder, manifest, tensors)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest["version"] != VERSION:
            raise ArtefactError(
                f"the gate '{folder}' has format {manifest['version']}, this knowgate reads {VERSION}. Fit it again."
            )
        if manifest["checksum"] != checksum(manifest):
            raise ArtefactError(
                f"{folder / MANIFEST} was edited by hand. Fit the gate again, or use knowgate calibrate."
            )
    except (BadInput, KeyError, TypeError) as error:
        raise ArtefactError(f"{folder / MANIFEST} is broken ({error}). Fit the gate again.") from None
    return dict(manifest)


def write_artefact(
    path: Path, manifest: Mapping[str, Any], tensors: Tensors, card: str, files: Mapping[str, bytes] | None = None
) -> None:
    """Save a fitted gate; an earlier one in the same place is replaced as a whole, anything else is left alone."""
    check_replaceable(path, MANIFEST, KIND)
    data = save({name: np.ascontiguousarray(block) for name, block in tensors.items()}) if tensors else b""
    with new_folder(path) as folder:
        if data:
            (folder / WEIGHTS).write_bytes(data)
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        full = {**manifest, "version": VERSION, "weights_sha256": hashlib.sha256(data).hexdigest()}
        write_json(folder / MANIFEST, {**full, "checksum": checksum(full)})
        write_text(folder / CARD, card)


def revise_artefact(artefact: Artefact, manifest: Mapping[str, Any], texts: Mapping[str, str], out: Path) -> None:
    """The same weights under another manifest: in place, or as a copy. `texts`: other files to write, by name."""
    if out.exists() and out.resolve() == artefact.path.resolve():
        _revise(out, manifest, texts)
        return
    check_replaceable(out, MANIFEST, KIND)
    with new_folder(out) as folder:
        shutil.copytree(artefact.path, folder, dirs_exist_ok=True)
        _revise(folder, manifest, texts)


def _revise(folder: Path, manifest: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """The manifest first: it alone decides."""
    write_json(folder / MANIFEST, {**manifest, "checksum": checksum(manifest)})
    for name, text in texts.items():
        write_text(folder / name, text)


def checksum(manifest: Mapping[str, Any]) -> str:
    """Of everything that decides how the gate behaves."""
    parts = [f"{key}={json.dumps(manifest[key])}" for key in sorted(manifest) if key != "checksum"]
    return sha256_text(*parts)[:16]


def check_bound(artefact: Artefact, model: str, prompts: str, *, plug_in: bool) -> str:
    """Refuse another model or wording than the gate was fitted on, unless as a plug-in; then say so."""
    made = artefact.manifest["model"]
    same = made["fingerprint"] == model and artefact.manifest["prompts"] == prompts
    if same:
        return ""
    if not plug_in:
        raise ArtefactError(
            f"the gate '{artefact.path.name}' was fitted on {made['name']} (model {made['fingerprint']}, prompts "
            f"{artefact.manifest['prompts']}), not on this model ({model}, prompts {prompts}). "
            f"Use it with its own (--model {made['name']}), fit it on this one, or use it as it is with --plug-in."
        )
    return f"plug-in, fitted on {made['name']}"
