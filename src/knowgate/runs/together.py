"""Do label runs belong together? What they must share depends on what is made of them; the caller says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from knowgate.errors import BadSetting

DIFFERENCES = {
    "model_fingerprint": "are of different models",
    "prompts_fingerprint": "are of different prompts",
    "retriever_fingerprint": "are of different retrievers",
    "reranker_fingerprint": "have passages that were chosen by different rerankers",
    "max_tokens": "drafted answers of different length",
}


def check_together(runs: Sequence[Path], settings: Sequence[Mapping[str, Any]], advice: Mapping[str, str]) -> None:
    """advice: the settings that must be the same, each with what to do where it is not."""
    check_named_once(runs)
    for key, way_out in advice.items():
        values = [str(one.get(key)) for one in settings]
        if len(set(values)) > 1:
            listed = "; ".join(f"{run}: {value}" for run, value in zip(runs, values, strict=True))
            raise BadSetting(f"the label runs {DIFFERENCES[key]} ({listed}); {way_out}.")


def check_named_once(runs: Sequence[Path]) -> None:
    whole = [run.resolve() for run in runs]
    twice = [run for number, run in enumerate(runs) if whole[number] in whole[:number]]
    if twice:
        raise BadSetting(f"the label run '{twice[0]}' is named twice. Name it once.")


def names_of(runs: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's where that tells them apart, else its whole path."""
    folders = [run.resolve() for run in runs]
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]
