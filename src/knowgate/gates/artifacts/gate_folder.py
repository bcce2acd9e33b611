"""Folders of fitted gates and arbiters: a manifest, `weights.safetensors` and a model card. Never pickle.

A folder is written completely or not at all. Reading checks every field of the manifest and the digest of every file
except the card, which users may edit. Each gate checks its own tensors and options when it is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from knowgate.core.artifacts import check_artifact_folder, check_digests, compute_digests
from knowgate.core.files import atomic_folder, check_replaceable, sha256_text, write_json, write_text
from knowgate.core.validation import expand_path, read_json
from knowgate.data.runs.folder import is_recorded_model, strip_model_prefix
from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.gates.artifacts.gate_manifest import read_gate_manifest
from knowgate.models.backend import UNNAMED_FINGERPRINT
from knowgate.types import ModelIdentity

FORMAT_VERSION = 1
GATE_MANIFEST, WEIGHTS_FILE, CARD_FILE = "gate.json", "weights.safetensors", "README.md"
SEEN_FILE = "seen.txt"  # keys of the questions that the gate or arbiter was fitted on
REFERENCE_FILE = "reference.safetensors"  # training questions with hidden states; users may delete it before sharing
ALWAYS_RETRIEVE = -1.0  # a threshold below every need, so that the gate always retrieves
GATE_KIND = "a fitted gate"
Tensors = Mapping[str, NDArray[Any]]
MakeError = Callable[[str], ArtifactError]  # builds the error to raise from a description of the problem
Verdict = Literal["need", "own"]  # decide by the calibrated need, or by whether the raw score exceeds 0.5

FITTED_FOLDER_HINT = "a folder written by `knowgate fit` (none has this name)"


@dataclass(frozen=True)
class ArtifactFormat:
    """How fitted gates, or fitted arbiters, are stored in a folder.

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

    def make_error(self, folder: Path, problem: str) -> ArtifactError:
        """Build the error to raise if the gate or arbiter in a folder cannot be used; `problem` says why."""
        return ArtifactError(f"the fitted {self.kind} '{folder}' cannot be used: {problem.rstrip('.')}. Fit it again.")


GATE_FORMAT = ArtifactFormat("gate", GATE_MANIFEST, "knowgate fit", read_gate_manifest)


@dataclass(frozen=True)
class Artifact:
    """A fitted gate or arbiter as loaded from its folder.

    Attributes:
        path: The folder.
        manifest: Content of `gate.json` or `arbiter.json`.
        tensors: The weights by name.
        format: Names and checks that differ between gates and arbiters.
    """

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
        """Build the error to raise if this gate or arbiter cannot be used; `problem` says why."""
        return self.format.make_error(self.path, problem)


def is_artifact(path: str | Path, manifest_file: str = GATE_MANIFEST) -> bool:
    """Return whether a path is a folder with this manifest file."""
    try:
        return (Path(path).expanduser() / manifest_file).is_file()
    except (OSError, ValueError, RuntimeError):  # the name is too long, contains NUL, or names an unknown user
        return False


def read_artifact(path: str | Path, artifact_format: ArtifactFormat = GATE_FORMAT) -> Artifact:
    """Load a fitted gate or arbiter from its folder and check its files.

    Args:
        path: Folder of the gate or arbiter.
        artifact_format: Whether a gate or an arbiter is expected.

    Raises:
        ArtifactError: The folder is incomplete, damaged, edited by hand or written by an incompatible version.
    """
    manifest_file = artifact_format.manifest_file
    if not is_artifact(path, manifest_file):
        raise ArtifactError(
            f"'{path}' is not the folder of a fitted {artifact_format.kind}: it has no {manifest_file}. Create one with "
            f"`{artifact_format.command}`."
        )
    folder = expand_path(path)
    make_error = functools.partial(artifact_format.make_error, folder)
    check_artifact_folder(folder, make_error)
    manifest = _read_manifest(folder / manifest_file, artifact_format, make_error)
    tensors = _read_tensors(folder / WEIGHTS_FILE, manifest, make_error)
    check_digests(folder, _get_digests(folder, manifest), make_error)
    return Artifact(folder, manifest, tensors, artifact_format)


def _get_digests(folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the recorded digests of the files of a folder, by file name."""
    digests = dict(manifest.get("files", {}))  # early versions wrote none
    if not (folder / REFERENCE_FILE).exists():  # users may delete this file before sharing a gate
        digests.pop(REFERENCE_FILE, None)
    return digests


def _read_manifest(file: Path, artifact_format: ArtifactFormat, make_error: MakeError) -> dict[str, Any]:
    """Read a manifest and check its version, checksum and fields."""
    try:
        manifest = dict(read_json(file))
        version = manifest["version"]
        is_intact = manifest["checksum"] == compute_checksum(manifest)
    except KeyError as error:
        raise make_error(f"{file.name} is broken: the field {error} is missing") from None
    except (BadInput, TypeError, ValueError) as error:
        raise make_error(f"{file.name} is broken ({error})") from None
    if version != FORMAT_VERSION:
        raise make_error(
            f"{file.name} has format version {str(version)[:40]}, but this version of knowgate reads {FORMAT_VERSION}"
        )
    if not is_intact:
        raise make_error(f"{file.name} was edited by hand (to change the threshold, use `knowgate calibrate`)")
    try:
        artifact_format.read_manifest(manifest, file.name)
    except BadInput as error:
        raise make_error(str(error)) from None
    return manifest


def _read_tensors(file: Path, manifest: Mapping[str, Any], make_error: MakeError) -> Tensors:
    """Read a weights file in the safetensors format. Its digest must match, and all numbers must be finite."""
    weights = file.read_bytes() if file.is_file() else b""  # a gate or arbiter without weights has no file
    if "weights_sha256" in manifest and hashlib.sha256(weights).hexdigest() != manifest["weights_sha256"]:
        raise make_error(f"the weights in {file.name} were changed or damaged")
    try:
        tensors: Tensors = load(weights) if weights else {}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:  # numpy lacks some number types
        raise make_error(f"the weights in {file.name} cannot be read: {error}") from None
    if any(not np.isfinite(tensor).all() for tensor in tensors.values()):
        raise make_error(f"the weights in {file.name} contain NaN or infinite numbers")
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
    """Save a fitted gate or arbiter in a folder. An earlier gate or arbiter there is replaced.

    Args:
        path: Folder to write.
        manifest: Content of the manifest, without version, digests and checksum.
        tensors: Weights, by name.
        card: Text of the model card, in Markdown.
        files: Content of further files, such as an adapter, by relative path.
        artifact_format: Whether it is a gate or an arbiter.
    """
    check_replaceable(path, artifact_format.manifest_file, f"a fitted {artifact_format.kind}")
    contents = dict(files or {})
    weights = b""  # without weights, the digest is computed from an empty file
    if tensors:
        weights = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
        contents[WEIGHTS_FILE] = weights
    header = {"version": FORMAT_VERSION, "weights_sha256": hashlib.sha256(weights).hexdigest()}
    with atomic_folder(path) as folder:
        _write_files(folder, contents)
        write_text(folder / CARD_FILE, card)
        _write_manifest(folder, {**manifest, **header}, artifact_format)


def _write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files to a folder, by relative path. Missing subfolders are created."""
    for relative_path, content in contents.items():
        file = folder / relative_path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def revise_artifact(
    artifact: Artifact,
    manifest: Mapping[str, Any],
    texts: Mapping[str, str],
    out: Path,
    folders: Mapping[str, Path] | None = None,
) -> None:
    """Write a gate or arbiter with the same weights and a new manifest, to a new folder or in place.

    Args:
        artifact: The artifact to start from.
        manifest: The new manifest.
        texts: Text files to write, by name.
        out: Target folder; may be the folder of `artifact`.
        folders: Folders to move into the target, by name. Folders of the same name are replaced.
    """
    in_place = out.exists() and out.resolve() == artifact.path.resolve()
    if not in_place:
        check_replaceable(out, artifact.format.manifest_file, f"a fitted {artifact.format.kind}")
    new_folders = folders or {}
    skip_replaced = shutil.ignore_patterns(*new_folders)
    copy_file = _link_or_copy if in_place else shutil.copy2
    with atomic_folder(out.resolve()) as target:
        shutil.copytree(artifact.path, target, ignore=skip_replaced, dirs_exist_ok=True, copy_function=copy_file)
        for name, source in new_folders.items():
            shutil.move(source, target / name)
        for name, text in texts.items():
            write_text(target / name, text)
        _write_manifest(target, manifest, artifact.format)


def _link_or_copy(source: str, target: str) -> None:
    """Create a hard link to a file, or copy the file if links fail."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write_manifest(folder: Path, manifest: Mapping[str, Any], artifact_format: ArtifactFormat) -> None:
    """Write the manifest with digests of the other files and its own checksum."""
    unchecked_files = (artifact_format.manifest_file, CARD_FILE)
    complete = {**manifest, "files": compute_digests(folder, exclude=unchecked_files)}
    write_json(folder / artifact_format.manifest_file, {**complete, "checksum": compute_checksum(complete)})


def compute_checksum(manifest: Mapping[str, Any]) -> str:
    """Compute the checksum of a manifest's fields, which is also the fingerprint of an arbiter."""
    fields = [f"{key}={json.dumps(manifest[key])}" for key in sorted(manifest) if key != "checksum"]
    return sha256_text(*fields)[:16]


def check_binding(artifact: Artifact, model: ModelIdentity, prompts: str, *, plug_in: bool) -> str:
    """Check that a gate or arbiter was fitted on this model and these prompts.

    If the gate or arbiter was fitted on imported answers (recorded by another program), only model names are compared.

    Args:
        artifact: The fitted gate or arbiter.
        model: The model.
        prompts: Fingerprint of the answer prompts.
        plug_in: Accept a gate or arbiter that was fitted on another model or other prompts.

    Returns:
        A note for decisions if `plug_in` accepted a mismatch, else ''.

    Raises:
        ArtifactError: Model or prompts are different, and `plug_in` is False.
    """
    fitted_on = artifact.manifest["model"]
    fitted_prompts = artifact.manifest["prompts"]
    if (fitted_on["fingerprint"], fitted_prompts) == (model.fingerprint, prompts):
        return ""
    if _may_be_import_of(str(fitted_on["name"]), model):
        return ""
    if plug_in:
        return f"plug-in, fitted on {fitted_on['name']}"
    if model.fingerprint == UNNAMED_FINGERPRINT:
        raise ArtifactError(
            f"the {artifact.format.kind} '{artifact.path.name}' was fitted on {fitted_on['name']}, and the LLM of the "
            "upstream has no name to compare it with. Set `upstream_model` to the name of the upstream's LLM."
        )
    raise ArtifactError(
        f"the {artifact.format.kind} '{artifact.path.name}' was fitted on {fitted_on['name']} (model "
        f"{fitted_on['fingerprint']}, prompts {fitted_prompts}). Your LLM is {model.name} (model {model.fingerprint}, prompts "
        f"{prompts}). Use the same LLM and prompts, fit it on your LLM, or set plug_in=True."
    )


def _may_be_import_of(recorded_name: str, model: ModelIdentity) -> bool:
    """Return whether `recorded_name` names answers that were imported, not generated, and may be from this model."""
    has_same_name = strip_model_prefix(recorded_name) == strip_model_prefix(model.name)
    # A server without a configured model name may run any LLM, so the imported answers may be from it.
    return is_recorded_model(recorded_name) and (has_same_name or model.fingerprint == UNNAMED_FINGERPRINT)


class FittedGateSpec(NamedTuple):
    """The parsed spec of a fitted gate: 'FOLDER' or 'FOLDER,verdict=own'.

    Attributes:
        folder: Folder of the gate.
        verdict: 'need' decides by the calibrated need for retrieval, 'own' by whether the raw score exceeds 0.5.
    """

    folder: str
    verdict: Verdict = "need"


def parse_fitted_spec(spec: str) -> FittedGateSpec | None:
    """Parse the spec of a fitted gate. Examples: 'my-gate' and 'my-gate,verdict=own'.

    Returns:
        The folder and the option; None if there is no such folder, or if it holds no fitted gate.

    Raises:
        BadSetting: The folder is followed by an unknown option.
    """
    if is_artifact(spec):
        return FittedGateSpec(spec)
    folder, comma, option = spec.rpartition(",")  # the name of the folder may contain commas, too
    if not comma or not is_artifact(folder):
        return None
    name, _, value = option.partition("=")
    verdict = value.strip()
    if name.strip() != "verdict" or verdict not in get_args(Verdict):
        allowed = " or ".join(f"verdict={each}" for each in get_args(Verdict))
        raise BadSetting(f"unknown option '{option.strip()}' of the fitted gate '{folder}'. Allowed: {allowed}.")
    return FittedGateSpec(folder, cast(Verdict, verdict))


def reject_other_folder(spec: str) -> None:
    """Raise ArtifactError if a spec is a folder without a fitted gate."""
    try:
        is_folder = bool(spec) and Path(spec).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # the name is too long, contains NUL, or names an unknown user
        return
    if is_folder and parse_fitted_spec(spec) is None:
        raise ArtifactError(
            f"the folder '{spec}' contains no fitted gate: it has no {GATE_MANIFEST}. Pass a folder that `knowgate fit` "
            "wrote for a gate."
        )
