"""Gates, arbiters and rerankers to and from the Hugging Face hub, `hf:OWNER/NAME` (extra `hub`), or a shared folder.

What goes out was found to be whole; what comes in is checked before it is anywhere: no code, no links, no pickles,
every file as it was written. The token is the one `huggingface_hub` knows (HF_TOKEN).
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from knowgate.core.artifacts import walk_files
from knowgate.core.files import atomic_folder
from knowgate.core.frameworks import wrap_errors
from knowgate.core.validation import expand_path
from knowgate.errors import ArtifactError, BadSetting, MissingExtra
from knowgate.gates.arbiters import load_arbiter
from knowgate.gates.artifacts.gate_folder import REFERENCE_FILE, read_artifact
from knowgate.retrieval.rerankers.cross_encoder import read_reranker_manifest

HUB_PREFIX = "hf:"
REPOSITORY_NAME = re.compile(r"[\w.-]+/[\w.-]+")
ARTIFACT_LOADERS: dict[str, Callable[[Path], Any]] = {
    "gate.json": read_artifact,
    "arbiter.json": lambda folder: load_arbiter(str(folder), plug_in=True),
    "reranker.json": read_reranker_manifest,
}


def push_artifact(folder: str | Path, target: str, *, public: bool = False, questions: bool = False) -> str:
    """What knowgate fitted, at `hf:OWNER/NAME` or in a folder; gives where it is. A new repository is private.

    questions: also the ten of the fit by which a server's hidden states are checked; without them it can do everything
    else.
    """
    source = expand_path(folder)
    kind, left_out = check_artifact_folder(source), [] if questions else [REFERENCE_FILE]
    if not target.startswith(HUB_PREFIX):
        out = expand_path(target)
        _copy(source, out, kind, left_out=left_out)
        return str(out)
    name, hub = _name(target), _hub()
    with wrap_errors("the Hugging Face hub"):
        api = hub.HfApi()
        api.create_repo(name, private=not public, exist_ok=True)
        said = f"knowgate {kind.removesuffix('.json')}"
        api.upload_folder(repo_id=name, folder_path=source, commit_message=said, ignore_patterns=left_out)
    return f"{HUB_PREFIX}{name}"


def pull_artifact(source: str, out: str | Path, *, revision: str | None = None) -> Path:
    """What was pushed, as a folder at `out`; an earlier one there is replaced as a whole, nothing else is."""
    place = expand_path(out)
    if not source.startswith(HUB_PREFIX):
        origin = expand_path(source)
        _copy(origin, place, check_artifact_folder(origin))
        return place
    name, hub = _name(source), _hub()
    with tempfile.TemporaryDirectory(prefix="knowgate-") as folder:
        with wrap_errors("the Hugging Face hub"):
            hub.snapshot_download(name, revision=revision, local_dir=folder)
        shutil.rmtree(Path(folder) / ".cache", ignore_errors=True)
        (Path(folder) / ".gitattributes").unlink(missing_ok=True)
        _copy(Path(folder), place, check_artifact_folder(Path(folder)))
    return place


def check_artifact_folder(folder: Path) -> str:
    """The manifest of a fitted thing that can be used; its own error where it cannot."""
    kind = next((name for name in ARTIFACT_LOADERS if (folder / name).is_file()), None)
    if kind is None:
        raise BadSetting(
            f"'{folder}' is nothing that knowgate fitted: it must have one of {', '.join(ARTIFACT_LOADERS)}."
        )
    ARTIFACT_LOADERS[kind](folder)
    return kind


def _copy(source: Path, out: Path, kind: str, *, left_out: Sequence[str] = ()) -> None:
    if out.exists() and (out.is_file() or any(out.iterdir())) and not (out / kind).is_file():
        raise ArtifactError(f"'{out}' exists and holds something else ({kind} is not there); choose another folder.")
    with atomic_folder(out) as folder:
        for path in walk_files(source):
            if path.name in left_out:
                continue
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _name(target: str) -> str:
    name = target.removeprefix(HUB_PREFIX)
    if not REPOSITORY_NAME.fullmatch(name):
        raise BadSetting(f"'{target}' is no repository of the hub: write {HUB_PREFIX}OWNER/NAME.")
    return name


def _hub() -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise MissingExtra("the Hugging Face hub", "hub") from None
    return huggingface_hub
