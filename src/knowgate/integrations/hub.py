"""Share gates, arbiters and rerankers through the Hugging Face hub (extra `hub`) or through a folder.

A repository on the hub is named `hf:OWNER/NAME`. Every artifact is checked before it is uploaded and after it is
downloaded. It must not contain code, links, pickle files or files that changed since they were written. The access
token is that of `huggingface_hub` (environment variable HF_TOKEN).
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from knowgate.core.files import atomic_folder
from knowgate.core.frameworks import wrap_errors
from knowgate.core.validation import expand_path
from knowgate.errors import ArtifactError, BadSetting, require_extra
from knowgate.gates.arbiters import load_arbiter
from knowgate.gates.artifacts.gate_folder import REFERENCE_FILE, read_artifact
from knowgate.retrieval.rerankers.cross_encoder import read_reranker_manifest

HUB_PREFIX = "hf:"
REPOSITORY_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# The manifest file of each kind of artifact, and the function that checks a folder with this manifest.
ARTIFACT_CHECKS: dict[str, Callable[[Path], Any]] = {
    "gate.json": read_artifact,
    "arbiter.json": lambda folder: load_arbiter(str(folder), plug_in=True),
    "reranker.json": read_reranker_manifest,
}


def push_artifact(folder: str | Path, target: str, *, public: bool = False, questions: bool = False) -> str:
    """Upload a gate, an arbiter or a reranker to the hub, or copy it to a folder.

    Args:
        folder: The folder that `knowgate fit` wrote.
        target: The repository, as `hf:OWNER/NAME`, or a folder.
        public: Whether a new repository is public. By default it is private.
        questions: Whether to include the ten example questions of a gate. They are only used to check that another
            server of the LLM returns the same hidden states.

    Returns:
        The repository or the folder that now contains the artifact.

    Raises:
        BadSetting: `folder` is not an artifact, or `target` is not a valid name.
        ArtifactError: The artifact is damaged, or the target folder contains something else.
    """
    source = expand_path(folder)
    manifest = check_shared_folder(source)
    excluded = [] if questions else [REFERENCE_FILE]
    if not target.startswith(HUB_PREFIX):
        out = expand_path(target)
        _copy(source, out, manifest, excluded=excluded)
        return str(out)
    name = _parse_repository(target)
    message = f"knowgate {manifest.removesuffix('.json')}"
    hub = _import_hub()
    with wrap_errors("the Hugging Face hub"):
        api = hub.HfApi()
        api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=source, commit_message=message, ignore_patterns=excluded)
    return f"{HUB_PREFIX}{name}"


def pull_artifact(source: str, out: str | Path, *, revision: str | None = None) -> Path:
    """Download a gate, an arbiter or a reranker from the hub, or copy it from a folder.

    Args:
        source: The repository, as `hf:OWNER/NAME`, or a folder.
        out: The folder to write. An artifact of the same kind is replaced; any other content raises ArtifactError.
        revision: The branch, tag or commit of the repository. Default: the newest version.

    Returns:
        The folder that now contains the artifact.
    """
    target = expand_path(out)
    if not source.startswith(HUB_PREFIX):
        _copy(expand_path(source), target, check_shared_folder(expand_path(source)))
        return target
    name = _parse_repository(source)
    with tempfile.TemporaryDirectory(prefix="knowgate-") as temporary:
        folder = Path(temporary)
        _download(name, revision, folder)
        _copy(folder, target, check_shared_folder(folder))
    return target


def _download(repository: str, revision: str | None, folder: Path) -> None:
    """Download a repository of the hub, without the hub's own files."""
    hub = _import_hub()
    with wrap_errors("the Hugging Face hub"):
        hub.snapshot_download(repository, revision=revision, local_dir=str(folder))
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    (folder / ".gitattributes").unlink(missing_ok=True)


def check_shared_folder(folder: Path) -> str:
    """Check all files of an artifact and return the name of its manifest, which tells its kind.

    Raises:
        BadSetting: The folder contains no manifest.
        ArtifactError: The artifact is damaged.
    """
    manifest = next((name for name in ARTIFACT_CHECKS if (folder / name).is_file()), None)
    if manifest is None:
        expected = ", ".join(ARTIFACT_CHECKS)
        raise BadSetting(f"'{folder}' contains none of the files {expected}. Name a folder that `knowgate fit` wrote.")
    ARTIFACT_CHECKS[manifest](folder)
    return manifest


def _copy(source: Path, out: Path, manifest: str, *, excluded: Sequence[str] = ()) -> None:
    """Copy an artifact (a gate, an arbiter or a reranker) to a folder.

    Args:
        source: The folder of the artifact.
        out: The folder to write. An artifact of the same kind is replaced.
        manifest: The file name of the manifest, by which an artifact of the same kind is recognized.
        excluded: The names of files that are not copied.

    Raises:
        ArtifactError: `out` contains something else, or is a file.
    """
    is_in_use = out.exists() and (out.is_file() or any(out.iterdir()))
    if is_in_use and not (out / manifest).is_file():
        raise ArtifactError(f"'{out}' already has other content, so it is not overwritten. Choose another folder.")
    ignore = shutil.ignore_patterns(*excluded)
    with atomic_folder(out) as folder:
        shutil.copytree(source, folder, ignore=ignore, copy_function=shutil.copyfile, dirs_exist_ok=True)


def _parse_repository(target: str) -> str:
    """Return `OWNER/NAME` of `hf:OWNER/NAME`; raise BadSetting if it has another form."""
    name = target.removeprefix(HUB_PREFIX)
    if not REPOSITORY_NAME.fullmatch(name):
        raise BadSetting(f"'{target}' is not a repository of the Hugging Face hub. Write {HUB_PREFIX}OWNER/NAME.")
    return name


def _import_hub() -> Any:
    """Import `huggingface_hub`; raise MissingExtra if it is not installed."""
    with require_extra("the Hugging Face hub", "hub"):
        import huggingface_hub
    return huggingface_hub
