"""`knowgate.toml` as a first run leaves it: settings that `ask` reads, with a comment on how they came about."""

from __future__ import annotations

import json
from pathlib import Path

from knowgate.files import sha256_text, write_text
from knowgate.firstrun.choosing import UNPROVEN, Choice
from knowgate.firstrun.wishes import Wishes
from knowgate.gates import DEFAULT, PACKAGED
from knowgate.pipeline import load_settings

OPENING = "# Written by knowgate start"


def write_config(wishes: Wishes, choice: Choice, cautions: list[str], written_before: str) -> Path:
    """Where it was written: not over a file that somebody else wrote or changed (its hash is not `written_before`)."""
    text = settings_text(wishes, choice, cautions)
    is_free = not wishes.config.exists() or _hash_of(wishes.config) == written_before
    place = wishes.config if is_free else wishes.out / "knowgate.toml"
    write_text(place, text)
    load_settings(place)  # what is not understood there is a fault of ours, and said at once
    return place


def _hash_of(file: Path) -> str:
    return sha256_text(file.read_text(encoding="utf-8", errors="replace"))


def config_hash(file: Path) -> str:
    return _hash_of(file)


def settings_text(wishes: Wishes, choice: Choice, cautions: list[str]) -> str:
    """The file. A guarantee was shown without an arbiter, so none chooses after retrieval."""
    said = [choice.proven or UNPROVEN]
    said += [one for one in cautions if one.partition(":")[0] not in said[0]]
    source = ("docs", _place(wishes.docs)) if wishes.docs else ("index", wishes.index)
    values = [("model", wishes.model), source, ("gate", _gate(choice))]
    lines = [f"{OPENING}. `knowgate ask` reads it in this folder; flags override it.", *map(_comment, said)]
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values]
    lines += [f"threshold = {choice.threshold:g}"] if choice.threshold is not None else []
    lines += ['arbiter = "none"  # the guarantee was shown without one'] if choice.proven else []
    lines += [f"# to try: gate = {json.dumps(_gate_path(other))}" for other in choice.others if not choice.proven]
    return "\n".join(lines) + "\n"


def _comment(words: str) -> str:
    return "# " + " ".join(words.split())


def _gate(choice: Choice) -> str:
    return _gate_path(choice.gate)


def _gate_path(gate: str) -> str:
    """A folder by its place, a spec as it is; a gate that comes with knowgate by a name that means it everywhere."""
    if Path(gate).resolve().parent == PACKAGED.resolve():
        return DEFAULT
    return _place(gate) if Path(gate).is_dir() else gate


def _place(path: str) -> str:
    """Below the folder it is used in, relative to it; else whole."""
    whole, here = Path(path).resolve(), Path.cwd().resolve()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) and whole != here else str(whole)
