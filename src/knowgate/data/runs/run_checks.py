"""Checks of label runs that are used together: each is named once, they are compatible, and they are finished."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from knowgate.errors import BadSetting

log = logging.getLogger(__name__)
MISMATCHES = {
    "model_fingerprint": "are of different models",
    "prompts_fingerprint": "are of different prompts",
    "retriever_fingerprint": "are of different retrievers",
    "reranker_fingerprint": "have passages that were chosen by different rerankers",
    "max_tokens": "drafted answers of different length",
}


def check_compatible(runs: Sequence[Path], settings: Sequence[Mapping[str, Any]], advice: Mapping[str, str]) -> None:
    """Raise BadSetting if a run is named twice or the runs differ in one of the settings in `advice`."""
    check_unique_runs(runs)
    for key, suggestion in advice.items():
        values = [str(run_settings.get(key)) for run_settings in settings]
        if len(set(values)) > 1:
            run_values = "; ".join(f"{run}: {value}" for run, value in zip(runs, values, strict=True))
            raise BadSetting(f"the label runs {MISMATCHES[key]} ({run_values}). {suggestion}.")


def check_unique_runs(runs: Sequence[Path]) -> None:
    """Raise BadSetting if a run is named twice."""
    resolved = [run.resolve() for run in runs]
    duplicates = [run for number, run in enumerate(runs) if resolved[number] in resolved[:number]]
    if duplicates:
        raise BadSetting(f"the label run '{duplicates[0]}' is named twice. Name it once.")


def name_runs(runs: Sequence[Path]) -> list[str]:
    """Name each run by its folder name, or by its full path if folder names are not unique."""
    folders = [run.resolve() for run in runs]
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def warn_if_unfinished(run: Path, n_rows: int, n_questions: object) -> None:
    """Warn that a run has rows for only some of its questions."""
    if isinstance(n_questions, int) and n_rows < n_questions:
        message = "%s holds %d of %d questions: it was not finished. Run the same `knowgate label` again to continue."
        log.warning(message, run, n_rows, n_questions)
