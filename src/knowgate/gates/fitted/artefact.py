"""A fitted gate on disk: `gate.json`, `weights.safetensors`, a card to read. Never pickle.

Written whole or not at all; read through one door: what `gate.json` says is checked field by field, and every file but
the card must be the one that was written. Which tensors a gate needs, the gate itself checks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from knowgate.doors import read_json, user_path
from knowgate.errors import ArtefactError, BadInput
from knowgate.files import check_replaceable, new_folder, sha256_text, write_json, write_text
from knowgate.folders import check_digests, check_folder, file_digests
from knowgate.gates.fitted.manifest import GateRecord, read_manifest
from knowgate.runs import use_with_its_own

VERSION = 1
MANIFEST, WEIGHTS, CARD, SEEN = "gate.json", "weights.safetensors", "README.md", "seen.txt"
REFERENCE = "reference.safetensors"  # questions of the fit with their states; may be kept from others
UNSEALED = (MANIFEST, CARD)  # the card decides nothing, and people write into it
ALWAYS = -1.0  # a threshold below every need: the gate retrieves for each question
KIND = "a fitted gate"
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Artefact:
    """A fitted gate's manifest and weights. `path` is where extra files (an adapter, say) lie.

    kind: what it is called where it cannot be used; arbiters are kept in the same way.
    """

    kind: ClassVar[str] = "gate"
    path: Path
    manifest: Mapping[str, Any]
    tensors: Tensors = field(default_factory=dict, repr=False)

    @property
    def options(self) -> Mapping[str, Any]:
        options: Mapping[str, Any] = self.manifest["options"]
        return options

    def refusal(self, problem: str) -> ArtefactError:
        """Why it cannot be used, and what to do."""
        return unusable(self.kind, self.path, problem)


def unusable(kind: str, folder: Path, problem: str) -> ArtefactError:
    return ArtefactError(f"the fitted {kind} '{folder}' cannot be used: {problem.rstrip('.')}. Fit it again.")


def _refusal(folder: Path, problem: str) -> ArtefactError:
    return unusable(Artefact.kind, folder, problem)


def is_artefact(path: str | Path, manifest: str = MANIFEST) -> bool:
    """manifest: the file that makes a folder one; arbiters have another."""
    try:
        return (Path(path).expanduser() / manifest).is_file()
    except (OSError, ValueError, RuntimeError):  # a name too long for a file, with NUL in it, of an unknown user
        return False


def read_artefact(path: str | Path) -> Artefact:
    """Load and check a fitted gate."""
    if not is_artefact(path):
        raise ArtefactError(f"'{path}' is not a fitted gate: it has no {MANIFEST}. Make one: knowgate fit")
    folder = user_path(path)
    check_folder(folder, lambda problem: _refusal(folder, problem))
    manifest = _manifest(folder)
    record = _record(folder, manifest)
    tensors = _tensors(folder, record.weights_sha256)
    files = {name: digest for name, digest in record.files.items() if name != REFERENCE or (folder / name).exists()}
    check_digests(folder, files, lambda problem: _refusal(folder, problem))
    return Artefact(folder, manifest, tensors)


def _tensors(folder: Path, wanted: str) -> Tensors:
    data = (folder / WEIGHTS).read_bytes() if (folder / WEIGHTS).is_file() else b""
    if hashlib.sha256(data).hexdigest() != wanted:
        raise ArtefactError(
            f"the weights of the fitted gate '{folder}' ({WEIGHTS}) were changed or damaged. Fit it again."
        )
    try:
        tensors: Tensors = load(data) if data else {}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:  # the latter for number types that numpy lacks
        raise ArtefactError(f"the weights of the fitted gate '{folder}' cannot be read: {error}.") from None
    if any(not np.isfinite(block).all() for block in tensors.values()):
        raise ArtefactError(f"the weights of the fitted gate '{folder}' hold NaN. Fit it again.")
    return tensors


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest["version"] != VERSION:
            raise ArtefactError(
                f"the gate '{folder}' has format {str(manifest['version'])[:40]}, this knowgate reads {VERSION}. "
                "Fit it again."
            )
        if manifest["checksum"] != checksum(manifest):
            raise ArtefactError(
                f"{folder / MANIFEST} was edited by hand. Fit the gate again, or use knowgate calibrate."
            )
    except (BadInput, KeyError, TypeError) as error:
        raise ArtefactError(f"{folder / MANIFEST} is broken ({error}). Fit the gate again.") from None
    return dict(manifest)


def _record(folder: Path, manifest: Mapping[str, Any]) -> GateRecord:
    try:
        return read_manifest(manifest, MANIFEST)
    except BadInput as error:
        raise _refusal(folder, str(error)) from None


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
        write_text(folder / CARD, card)
        _seal(folder, {**manifest, "version": VERSION, "weights_sha256": hashlib.sha256(data).hexdigest()})


def revise_artefact(
    artefact: Artefact,
    manifest: Mapping[str, Any],
    texts: Mapping[str, str],
    out: Path,
    folders: Mapping[str, Path] | None = None,
) -> None:
    """The same weights under another manifest: in place, or as a copy. `texts`: other files to write, by name.
    `folders`: moved into it, in the place of those of their names.

    In place too the whole folder is made anew and then takes the old one's place, so that a manifest never stands
    beside files it does not know.
    """
    in_place = out.exists() and out.resolve() == artefact.path.resolve()
    if not in_place:
        check_replaceable(out, MANIFEST, KIND)
    with new_folder(out.resolve()) as folder:
        shutil.copytree(
            artefact.path,
            folder,
            ignore=shutil.ignore_patterns(*(folders or {})),
            dirs_exist_ok=True,
            copy_function=_link if in_place else shutil.copy2,
        )
        for name, source in (folders or {}).items():
            shutil.move(source, folder / name)
        for name, text in texts.items():
            write_text(folder / name, text)
        _seal(folder, manifest)


def _link(source: str, target: str) -> None:
    """A second name for a file that is about to lose its first: a judge can have gigabytes."""
    try:
        os.link(source, target)
    except OSError:  # a file system without such names
        shutil.copy2(source, target)


def _seal(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest with the digests of the files that lie beside it."""
    full = {**manifest, "files": file_digests(folder, leave=UNSEALED)}
    write_json(folder / MANIFEST, {**full, "checksum": checksum(full)})


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
            f"{use_with_its_own(made['name'])}"
        )
    return f"plug-in, fitted on {made['name']}"
