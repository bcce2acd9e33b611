"""A guided first run: documents, an LLM and perhaps questions in; index, labels, gate, proof, report, settings out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.firstrun.choosing import UNPROVEN
    from knowgate.firstrun.progress_file import earlier
    from knowgate.firstrun.steps import FirstRun, explain_interruption, first_run
    from knowgate.firstrun.wishes import CONFIG, COUNT, MAX_LOSS, OUT, Wishes
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "CONFIG",
    "COUNT",
    "FirstRun",
    "MAX_LOSS",
    "OUT",
    "UNPROVEN",
    "Wishes",
    "earlier",
    "explain_interruption",
    "first_run",
]
