"""A fitted gate as commands write it: its folder, and by whose verdict it decides. 'DIR' or 'DIR,verdict=own'."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from knowgate.errors import BadSetting
from knowgate.gates.fitted.artefact import is_artefact

Verdict = Literal["need", "own"]  # the calibrated need, or the classifier's own raw score at 0.5


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
