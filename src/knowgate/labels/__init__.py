"""How a question is labelled: answered both ways, sampled, graded; runs that go on where they stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.labels.agreement import compare_graders
    from knowgate.labels.grading import Grader, golds, load_grader
    from knowgate.labels.imported import import_answers
    from knowgate.labels.kbsat import make_sets
    from knowgate.labels.label_data import label
    from knowgate.labels.labeller import Labeller
    from knowgate.labels.layers import NAMED_LAYERS, named_layers
    from knowgate.labels.logbook import entries_of, scope_of, time_sensitive_entries
    from knowgate.labels.mask import is_mask, says_mask
    from knowgate.labels.plan import CANDIDATES, Plan, passages_shown
    from knowgate.labels.runner import LocalRunner
    from knowgate.labels.running import far_runner, is_far, joined, named, near_runner
    from knowgate.labels.session import Tally, about, fingerprint_questions, label_run
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "CANDIDATES",
    "Grader",
    "Labeller",
    "LocalRunner",
    "NAMED_LAYERS",
    "Plan",
    "Tally",
    "about",
    "compare_graders",
    "entries_of",
    "far_runner",
    "fingerprint_questions",
    "golds",
    "import_answers",
    "is_far",
    "joined",
    "is_mask",
    "label",
    "label_run",
    "load_grader",
    "make_sets",
    "named",
    "named_layers",
    "near_runner",
    "passages_shown",
    "says_mask",
    "scope_of",
    "time_sensitive_entries",
]
