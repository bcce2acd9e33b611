"""Folders of fitted gates and arbiters: a manifest, `weights.safetensors` and a model card. Never pickle.

A folder is written completely or not at all. Reading checks every field of the manifest and the digest of every file
except the card, which users may edit. Each gate checks its own tensors and options when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from knowgate.core.artifacts import check_artifact_folder, check_digests, compute_digests
from knowgate.core.files import atomic_folder, check_replaceable, sha256_text, write_json, write_text
from knowgate.core.validation import expand_path, read_json
from knowgate.data.runs.folder import explain_model_mismatch
from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.gates.artifacts.gate_manifest import read_gate_manifest

FORMAT_VERSION = 1
GATE_MANIFEST, WEIGHTS_FILE, CARD_FILE = "gate.json", "weights.safetensors", "README.md"
SEEN_FILE = "seen.txt"  # keys of the questions that the gate or arbiter was fitted on
REFERENCE_FILE = "reference.safetensors"  # training questions with hidden states; users may delete it before sharing
ALWAYS_RETRIEVE = -1.0  # a threshold below every need
GATE_KIND = "a fitted gate"
Tensors = Mapping[str, NDArray[Any]]
Verdict = Literal["need", "own"]  # decide by the calibrated need, or by the classifier's raw score at 0.5

FITTED_FOLDER_HINT = "a folder written by `knowgate fit` (none has this name)"
OTHER_FOLDERS = {
    "arbiter.json": "It holds a fitted arbiter: pass it as `arbiter`.",
    "run.json": "It holds a label run: fit a gate on it with `knowgate fit`.",
}


@dataclass(frozen=True)
class ArtifactFormat:
    """How artifacts of one kind are stored.

    Attributes:
        kind: What error messages call the artifact: "gate" or "arbiter".
        manifest_file: Name of the JSON file that identifies the folder.
        command: Command that creates such a folder.
        read_manifest: Validates the manifest; raises BadInput that names the wrong field.
    """

    kind: str
    manifest_file: str
    command: str
    read_manifest: Callable[[Mapping[str, Any], str], object]


GATE_FORMAT = ArtifactFormat("gate", GATE_MANIFEST, "knowgate fit", read_gate_manifest)


@dataclass(frozen=True)
class Artifact:
    """The manifest and weights of a fitted gate or arbiter. `path` is its folder."""

    path: Path
    manifest: Mapping[str, Any]
    tensors: Tensors = field(default_factory=dict, repr=False)
    format: ArtifactFormat = field(default=GATE_FORMAT, repr=False)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that the gate or arbiter was fitted with."""
        options: Mapping[str, Any] = self.manifest["options"]
        return options

    def make_error(self, problem: str) -> ArtifactError:
        """Build the error to raise when this artifact cannot be used."""
        return _make_error(self.path, problem, self.format)


def _make_error(folder: Path, problem: str, artifact_format: ArtifactFormat) -> ArtifactError:
    """Build the error to raise when an artifact cannot be used."""
    return ArtifactError(
        f"the fitted {artifact_format.kind} '{folder}' cannot be used: {problem.rstrip('.')}. Fit it again."
    )


def is_artifact(path: str | Path, manifest_file: str = GATE_MANIFEST) -> bool:
    """Return whether a path is a folder with this manifest, by default a fitted gate."""
    try:
        return (Path(path).expanduser() / manifest_file).is_file()
    except (OSError, ValueError, RuntimeError):  # the name is too long, contains NUL, or names an unknown user
        return False


def read_artifact(path: str | Path, artifact_format: ArtifactFormat = GATE_FORMAT) -> Artifact:
    """Load a fitted gate or arbiter and check its files.

    Raises:
        ArtifactError: The folder is incomplete, damaged, edited by hand or of another version.
    """
    kind, manifest_file = artifact_format.kind, artifact_format.manifest_file
    if not is_artifact(path, manifest_file):
        raise ArtifactError(
            f"'{path}' is not a fitted {kind}: it has no {manifest_file}. Make one: {artifact_format.command}"
        )
    folder = expand_path(path)

    def make_error(problem: str) -> ArtifactError:
        """Build the error to raise when this folder cannot be used."""
        return _make_error(folder, problem, artifact_format)

    check_artifact_folder(folder, make_error)
    manifest = _read_manifest(folder, artifact_format)
    digests = dict(manifest.get("files", {}))  # early versions wrote none
    if not (folder / REFERENCE_FILE).exists():
        digests.pop(REFERENCE_FILE, None)
    weights = (folder / WEIGHTS_FILE).read_bytes() if (folder / WEIGHTS_FILE).is_file() else b""
    if hashlib.sha256(weights).hexdigest() != manifest.get("weights_sha256", hashlib.sha256(weights).hexdigest()):
        raise make_error(f"the weights ({WEIGHTS_FILE}) were changed or damaged")
    check_digests(folder, digests, make_error)
    return Artifact(folder, manifest, _parse_tensors(weights, make_error), artifact_format)


def _read_manifest(folder: Path, artifact_format: ArtifactFormat) -> dict[str, Any]:
    """Read the manifest and check version, checksum and fields."""
    name = artifact_format.manifest_file
    try:
        manifest = read_json(folder / name)
        version, checksum = manifest["version"], manifest["checksum"]
        is_intact = checksum == compute_checksum(manifest)
    except KeyError as error:
        raise _make_error(folder, f"{name} is broken (it lacks {error})", artifact_format) from None
    except (BadInput, TypeError) as error:
        raise _make_error(folder, f"{name} is broken ({error})", artifact_format) from None
    if version != FORMAT_VERSION:
        problem = f"it has format {str(version)[:40]}, this knowgate reads {FORMAT_VERSION}"
        raise _make_error(folder, problem, artifact_format)
    if not is_intact:
        advice = " (use `knowgate calibrate` to change the threshold)" if artifact_format.kind == "gate" else ""
        raise _make_error(folder, f"{name} was edited by hand{advice}", artifact_format)
    try:
        artifact_format.read_manifest(manifest, name)
    except BadInput as error:
        raise _make_error(folder, str(error), artifact_format) from None
    return dict(manifest)


def _parse_tensors(data: bytes, make_error: Callable[[str], ArtifactError]) -> Tensors:
    """Parse the weights and check that they are finite."""
    try:
        tensors: Tensors = load(data) if data else {}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:  # the last two: number types numpy lacks
        raise make_error(f"its weights cannot be read: {error}") from None
    if any(not np.isfinite(tensor).all() for tensor in tensors.values()):
        raise make_error("its weights contain NaN or infinite numbers")
    return tensors


def write_artifact(
    path: Path,
    manifest: Mapping[str, Any],
    tensors: Tensors,
    card: str,
    files: Mapping[str, bytes] | None = None,
    *,
    artifact_format: ArtifactFormat = GATE_FORMAT,
) -> None:
    """Save a fitted gate or arbiter; replaces an earlier one at the same path, but no other folder.

    Args:
        path: Folder to write.
        manifest: Content of the manifest, without version, digests and checksum.
        tensors: Weights, by name.
        card: Text of the model card, in Markdown.
        files: Further files by their relative path, such as an adapter.
        artifact_format: Whether it is a gate or an arbiter.
    """
    check_replaceable(path, artifact_format.manifest_file, f"a fitted {artifact_format.kind}")
    weights = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}) if tensors else b""
    with atomic_folder(path) as folder:
        if weights:
            (folder / WEIGHTS_FILE).write_bytes(weights)
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        write_text(folder / CARD_FILE, card)
        header = {"version": FORMAT_VERSION, "weights_sha256": hashlib.sha256(weights).hexdigest()}
        _write_manifest(folder, {**manifest, **header}, artifact_format)


def revise_artifact(
    artifact: Artifact,
    manifest: Mapping[str, Any],
    texts: Mapping[str, str],
    out: Path,
    folders: Mapping[str, Path] | None = None,
) -> None:
    """Write an artifact with the same weights and another manifest, in place or as a copy.

    Even in place the folder is built anew and then swapped in, so that manifest and files always match.

    Args:
        artifact: The artifact to start from.
        manifest: The new manifest.
        texts: Text files to write, by name.
        out: Target folder; may be the folder of `artifact`.
        folders: Folders to move into the target; they replace those of the same name.
    """
    in_place = out.exists() and out.resolve() == artifact.path.resolve()
    if not in_place:
        check_replaceable(out, artifact.format.manifest_file, f"a fitted {artifact.format.kind}")
    with atomic_folder(out.resolve()) as folder:
        shutil.copytree(
            artifact.path,
            folder,
            ignore=shutil.ignore_patterns(*(folders or {})),
            dirs_exist_ok=True,
            copy_function=_link_or_copy if in_place else shutil.copy2,
        )
        for name, source in (folders or {}).items():
            shutil.move(source, folder / name)
        for name, text in texts.items():
            write_text(folder / name, text)
        _write_manifest(folder, manifest, artifact.format)


def _link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, because a judge can have gigabytes; copy it where links are not supported."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write_manifest(folder: Path, manifest: Mapping[str, Any], artifact_format: ArtifactFormat) -> None:
    """Write the manifest with the digests of the other files and a checksum of itself."""
    unchecked_files = (artifact_format.manifest_file, CARD_FILE)
    complete = {**manifest, "files": compute_digests(folder, exclude=unchecked_files)}
    write_json(folder / artifact_format.manifest_file, {**complete, "checksum": compute_checksum(complete)})


def compute_checksum(manifest: Mapping[str, Any]) -> str:
    """Compute the checksum of all fields of a manifest, which also is the fingerprint of an arbiter."""
    fields = [f"{key}={json.dumps(manifest[key])}" for key in sorted(manifest) if key != "checksum"]
    return sha256_text(*fields)[:16]


def check_binding(artifact: Artifact, model: str, prompts: str, *, plug_in: bool) -> str:
    """Check that an artifact was fitted on this model and these answer prompts.

    Args:
        artifact: The fitted gate or arbiter.
        model: Fingerprint of the model.
        prompts: Fingerprint of the answer prompts.
        plug_in: Accept another model or other prompts.

    Returns:
        A note for decisions if another model is accepted, else ''.

    Raises:
        ArtifactError: The artifact was fitted on another model or other prompts.
    """
    trained_on, trained_prompts = artifact.manifest["model"], artifact.manifest["prompts"]
    if (trained_on["fingerprint"], trained_prompts) == (model, prompts):
        return ""
    if plug_in:
        return f"plug-in, fitted on {trained_on['name']}"
    raise ArtifactError(
        f"the {artifact.format.kind} '{artifact.path.name}' was fitted on {trained_on['name']} (model "
        f"{trained_on['fingerprint']}, prompts {trained_prompts}), not on this model ({model}, prompts {prompts}). "
        f"{explain_model_mismatch(trained_on['name'])}"
    )


class FittedGateSpec(NamedTuple):
    """The folder of a fitted gate and the score it decides by: 'DIR' or 'DIR,verdict=own'."""

    folder: str
    verdict: Verdict = "need"


def parse_fitted_spec(spec: str) -> FittedGateSpec | None:
    """Parse the spec of a fitted gate; return None if it names no folder of one."""
    if is_artifact(spec):
        return FittedGateSpec(spec)
    folder, comma, option = spec.rpartition(",")
    if not comma or not is_artifact(folder):
        return None
    name, _, value = option.partition("=")
    if name.strip() != "verdict" or value.strip() not in get_args(Verdict):
        allowed = " or ".join(f"verdict={verdict}" for verdict in get_args(Verdict))
        raise BadSetting(f"the fitted gate '{folder}' has the option '{option.strip()}'; allowed: {allowed}.")
    return FittedGateSpec(folder, "own" if value.strip() == "own" else "need")


def reject_other_folder(spec: str) -> None:
    """Raise ArtifactError if a spec names a folder that is not a fitted gate."""
    try:
        is_folder = bool(spec) and Path(spec).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # the name is too long, contains NUL, or names an unknown user
        return
    if is_folder and parse_fitted_spec(spec) is None:
        hints = [hint for manifest_file, hint in OTHER_FOLDERS.items() if is_artifact(spec, manifest_file)]
        hint = hints[0] if hints else "Give one that `knowgate fit` wrote."
        raise ArtifactError(f"the folder '{spec}' holds no fitted gate: it has no {GATE_MANIFEST}. {hint}")
