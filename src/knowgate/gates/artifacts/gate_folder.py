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
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from knowgate.core.artifacts import check_artifact_folder, check_digests, compute_digests
from knowgate.core.files import atomic_folder, check_replaceable, sha256_text, write_json, write_text
from knowgate.core.validation import expand_path, read_json
from knowgate.data.runs.folder import explain_model_mismatch
from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.gates.artifacts.gate_manifest import GateManifest, read_gate_manifest

GATE_FORMAT_VERSION = 1
GATE_MANIFEST, WEIGHTS_FILE, CARD_FILE, SEEN_FILE = "gate.json", "weights.safetensors", "README.md", "seen.txt"
REFERENCE_FILE = "reference.safetensors"  # questions of the fit with their states; may be kept from others
UNSEALED_FILES = (GATE_MANIFEST, CARD_FILE)  # the card decides nothing, and people write into it
ALWAYS_RETRIEVE = -1.0  # a threshold below every need: the gate retrieves for each question
GATE_KIND = "a fitted gate"
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Artifact:
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

    def refusal(self, problem: str) -> ArtifactError:
        """Why it cannot be used, and what to do."""
        return build_artifact_error(self.kind, self.path, problem)


def build_artifact_error(kind: str, folder: Path, problem: str) -> ArtifactError:
    return ArtifactError(f"the fitted {kind} '{folder}' cannot be used: {problem.rstrip('.')}. Fit it again.")


def _refusal(folder: Path, problem: str) -> ArtifactError:
    return build_artifact_error(Artifact.kind, folder, problem)


def is_artifact(path: str | Path, manifest: str = GATE_MANIFEST) -> bool:
    """manifest: the file that makes a folder one; arbiters have another."""
    try:
        return (Path(path).expanduser() / manifest).is_file()
    except (OSError, ValueError, RuntimeError):  # a name too long for a file, with NUL in it, of an unknown user
        return False


def read_artifact(path: str | Path) -> Artifact:
    """Load and check a fitted gate."""
    if not is_artifact(path):
        raise ArtifactError(f"'{path}' is not a fitted gate: it has no {GATE_MANIFEST}. Make one: knowgate fit")
    folder = expand_path(path)
    check_artifact_folder(folder, lambda problem: _refusal(folder, problem))
    manifest = _manifest(folder)
    record = _record(folder, manifest)
    tensors = _tensors(folder, record.weights_sha256)
    files = {
        name: digest for name, digest in record.files.items() if name != REFERENCE_FILE or (folder / name).exists()
    }
    check_digests(folder, files, lambda problem: _refusal(folder, problem))
    return Artifact(folder, manifest, tensors)


def _tensors(folder: Path, wanted: str) -> Tensors:
    data = (folder / WEIGHTS_FILE).read_bytes() if (folder / WEIGHTS_FILE).is_file() else b""
    if hashlib.sha256(data).hexdigest() != wanted:
        raise ArtifactError(
            f"the weights of the fitted gate '{folder}' ({WEIGHTS_FILE}) were changed or damaged. Fit it again."
        )
    try:
        tensors: Tensors = load(data) if data else {}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:  # the latter for number types that numpy lacks
        raise ArtifactError(f"the weights of the fitted gate '{folder}' cannot be read: {error}.") from None
    if any(not np.isfinite(block).all() for block in tensors.values()):
        raise ArtifactError(f"the weights of the fitted gate '{folder}' hold NaN. Fit it again.")
    return tensors


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_json(folder / GATE_MANIFEST)
        if manifest["version"] != GATE_FORMAT_VERSION:
            raise ArtifactError(
                f"the gate '{folder}' has format {str(manifest['version'])[:40]}, this knowgate reads {GATE_FORMAT_VERSION}. "
                "Fit it again."
            )
        if manifest["checksum"] != compute_checksum(manifest):
            raise ArtifactError(
                f"{folder / GATE_MANIFEST} was edited by hand. Fit the gate again, or use knowgate calibrate."
            )
    except (BadInput, KeyError, TypeError) as error:
        raise ArtifactError(f"{folder / GATE_MANIFEST} is broken ({error}). Fit the gate again.") from None
    return dict(manifest)


def _record(folder: Path, manifest: Mapping[str, Any]) -> GateManifest:
    try:
        return read_gate_manifest(manifest, GATE_MANIFEST)
    except BadInput as error:
        raise _refusal(folder, str(error)) from None


def write_artifact(
    path: Path, manifest: Mapping[str, Any], tensors: Tensors, card: str, files: Mapping[str, bytes] | None = None
) -> None:
    """Save a fitted gate; an earlier one in the same place is replaced as a whole, anything else is left alone."""
    check_replaceable(path, GATE_MANIFEST, GATE_KIND)
    data = save({name: np.ascontiguousarray(block) for name, block in tensors.items()}) if tensors else b""
    with atomic_folder(path) as folder:
        if data:
            (folder / WEIGHTS_FILE).write_bytes(data)
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        write_text(folder / CARD_FILE, card)
        _seal(folder, {**manifest, "version": GATE_FORMAT_VERSION, "weights_sha256": hashlib.sha256(data).hexdigest()})


def revise_artifact(
    artifact: Artifact,
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
    in_place = out.exists() and out.resolve() == artifact.path.resolve()
    if not in_place:
        check_replaceable(out, GATE_MANIFEST, GATE_KIND)
    with atomic_folder(out.resolve()) as folder:
        shutil.copytree(
            artifact.path,
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
    full = {**manifest, "files": compute_digests(folder, exclude=UNSEALED_FILES)}
    write_json(folder / GATE_MANIFEST, {**full, "checksum": compute_checksum(full)})


def compute_checksum(manifest: Mapping[str, Any]) -> str:
    """Of everything that decides how the gate behaves."""
    parts = [f"{key}={json.dumps(manifest[key])}" for key in sorted(manifest) if key != "checksum"]
    return sha256_text(*parts)[:16]


def check_binding(artifact: Artifact, model: str, prompts: str, *, plug_in: bool) -> str:
    """Refuse another model or wording than the gate was fitted on, unless as a plug-in; then say so."""
    made = artifact.manifest["model"]
    same = made["fingerprint"] == model and artifact.manifest["prompts"] == prompts
    if same:
        return ""
    if not plug_in:
        raise ArtifactError(
            f"the gate '{artifact.path.name}' was fitted on {made['name']} (model {made['fingerprint']}, prompts "
            f"{artifact.manifest['prompts']}), not on this model ({model}, prompts {prompts}). "
            f"{explain_model_mismatch(made['name'])}"
        )
    return f"plug-in, fitted on {made['name']}"


Verdict = Literal["need", "own"]  # the calibrated need, or the classifier's own raw score at 0.5

FITTED_FOLDER_HINT = "a folder that `knowgate fit` made (there is none of this name)"  # what a gate's name may be, too
FOLDER_HINTS = {  # what other folders are made by, and what they are for
    "arbiter.json": "It holds a fitted arbiter, which is used with --arbiter.",
    "run.json": "It holds a label run: fit a gate on it (knowgate fit ... --labels).",
}


class FittedGateSpec(NamedTuple):
    """Where a fitted gate lies and how it is to decide."""

    folder: str
    verdict: Verdict = "need"


def parse_fitted_spec(text: str) -> FittedGateSpec | None:
    """What a text says of a fitted gate; None where it names no folder of one."""
    if is_artifact(text):
        return FittedGateSpec(text)
    folder, comma, option = text.rpartition(",")
    if not comma or not is_artifact(folder):
        return None
    name, _, value = option.partition("=")
    if name.strip() != "verdict" or value.strip() not in get_args(Verdict):
        allowed = " or ".join(f"verdict={verdict}" for verdict in get_args(Verdict))
        raise BadSetting(f"the fitted gate '{folder}' has the option '{option.strip()}'; allowed: {allowed}.")
    return FittedGateSpec(folder, "own" if value.strip() == "own" else "need")


def reject_other_folder(text: str) -> None:
    """Say of a folder without a fitted gate that it has none; any other text passes."""
    if not text or parse_fitted_spec(text) is not None or not _is_folder(text):
        return
    held = [words for manifest, words in FOLDER_HINTS.items() if is_artifact(text, manifest)]
    advice = held[0] if held else "Give one that `knowgate fit` made with --out."
    raise ArtifactError(f"the folder '{text}' holds no fitted gate: it has no {GATE_MANIFEST}. {advice}")


def _is_folder(text: str) -> bool:
    try:
        return Path(text).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # a name too long for a file, with NUL in it, of an unknown user
        return False
