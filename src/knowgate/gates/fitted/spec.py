"""A fitted gate as commands write it: its folder, and by whose verdict it decides. 'DIR' or 'DIR,verdict=own'."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, get_args

from knowgate.errors import ArtefactError, BadSetting
from knowgate.gates.fitted.artefact import MANIFEST, is_artefact

Verdict = Literal["need", "own"]  # the calibrated need, or the classifier's own raw score at 0.5

MADE = "a folder that `knowgate fit` made (there is none of this name)"  # what a gate's name may be, too
HELD = {  # what other folders are made by, and what they are for
    "arbiter.json": "It holds a fitted arbiter, which is used with --arbiter.",
    "run.json": "It holds a label run: fit a gate on it (knowgate fit ... --labels).",
}


class FittedSpec(NamedTuple):
    """Where a fitted gate lies and how it is to decide."""

    folder: str
    verdict: Verdict = "need"


def fitted_spec(text: str) -> FittedSpec | None:
    """What a text says of a fitted gate; None where it names no folder of one."""
    if is_artefact(text):
        return FittedSpec(text)
    folder, comma, option = text.rpartition(",")
    if not comma or not is_artefact(folder):
        return None
    name, _, value = option.partition("=")
    if name.strip() != "verdict" or value.strip() not in get_args(Verdict):
        allowed = " or ".join(f"verdict={verdict}" for verdict in get_args(Verdict))
        raise BadSetting(f"the fitted gate '{folder}' has the option '{option.strip()}'; allowed: {allowed}.")
    return FittedSpec(folder, "own" if value.strip() == "own" else "need")


def refuse_folder(text: str) -> None:
    """Say of a folder without a fitted gate that it has none; any other text passes."""
    if not text or fitted_spec(text) is not None or not _is_folder(text):
        return
    held = [words for manifest, words in HELD.items() if is_artefact(text, manifest)]
    advice = held[0] if held else "Give one that `knowgate fit` made with --out."
    raise ArtefactError(f"the folder '{text}' holds no fitted gate: it has no {MANIFEST}. {advice}")


def _is_folder(text: str) -> bool:
    try:
        return Path(text).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # a name too long for a file, with NUL in it, of an unknown user
        return False
