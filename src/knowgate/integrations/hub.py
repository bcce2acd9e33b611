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

from knowgate.arbiters import load_arbiter
from knowgate.doors import user_path
from knowgate.errors import ArtefactError, BadSetting, MissingExtra
from knowgate.files import new_folder
from knowgate.folders import walk
from knowgate.gates import REFERENCE, read_artefact
from knowgate.integrations.guests import blamed
from knowgate.rerank import read_manifest

HUB = "hf:"
NAME = re.compile(r"[\w.-]+/[\w.-]+")
KINDS: dict[str, Callable[[Path], Any]] = {
    "gate.json": read_artefact,
    "arbiter.json": lambda folder: load_arbiter(str(folder), plug_in=True),
    "reranker.json": read_manifest,
}


def push(folder: str | Path, target: str, *, public: bool = False, questions: bool = False) -> str:
    """What knowgate fitted, at `hf:OWNER/NAME` or in a folder; gives where it is. A new repository is private.

    questions: also the ten of the fit by which a server's hidden states are checked; without them it can do everything
    else.
    """
    source = user_path(folder)
    kind, left_out = check_whole_folder(source), [] if questions else [REFERENCE]
    if not target.startswith(HUB):
        out = user_path(target)
        _copy(source, out, kind, left_out=left_out)
        return str(out)
    name, hub = _name(target), _hub()
    with blamed("the Hugging Face hub"):
        api = hub.HfApi()
        api.create_repo(name, private=not public, exist_ok=True)
        said = f"knowgate {kind.removesuffix('.json')}"
        api.upload_folder(repo_id=name, folder_path=source, commit_message=said, ignore_patterns=left_out)
    return f"{HUB}{name}"


def pull(source: str, out: str | Path, *, revision: str | None = None) -> Path:
    """What was pushed, as a folder at `out`; an earlier one there is replaced as a whole, nothing else is."""
    place = user_path(out)
    if not source.startswith(HUB):
        origin = user_path(source)
        _copy(origin, place, check_whole_folder(origin))
        return place
    name, hub = _name(source), _hub()
    with tempfile.TemporaryDirectory(prefix="knowgate-") as folder:
        with blamed("the Hugging Face hub"):
            hub.snapshot_download(name, revision=revision, local_dir=folder)
        shutil.rmtree(Path(folder) / ".cache", ignore_errors=True)
        (Path(folder) / ".gitattributes").unlink(missing_ok=True)
        _copy(Path(folder), place, check_whole_folder(Path(folder)))
    return place


def check_whole_folder(folder: Path) -> str:
    """The manifest of a fitted thing that can be used; its own error where it cannot."""
    kind = next((name for name in KINDS if (folder / name).is_file()), None)
    if kind is None:
        raise BadSetting(f"'{folder}' is nothing that knowgate fitted: it must have one of {', '.join(KINDS)}.")
    KINDS[kind](folder)
    return kind


def _copy(source: Path, out: Path, kind: str, *, left_out: Sequence[str] = ()) -> None:
    if out.exists() and (out.is_file() or any(out.iterdir())) and not (out / kind).is_file():
        raise ArtefactError(f"'{out}' exists and holds something else ({kind} is not there); choose another folder.")
    with new_folder(out) as folder:
        for path in walk(source):
            if path.name in left_out:
                continue
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _name(target: str) -> str:
    name = target.removeprefix(HUB)
    if not NAME.fullmatch(name):
        raise BadSetting(f"'{target}' is no repository of the hub: write {HUB}OWNER/NAME.")
    return name


def _hub() -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise MissingExtra("the Hugging Face hub", "hub") from None
    return huggingface_hub
