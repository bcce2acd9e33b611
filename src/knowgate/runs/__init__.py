"""What a run keeps and how it is read back: row folders, label rows, needs on record, readings, splits, trials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.runs.aligned import needs_of
    from knowgate.runs.beliefs import RecordedBeliefs, read_beliefs, write_beliefs
    from knowgate.runs.caveats import AGREEMENT, cautions, cautions_of, count_synthetic, synthetic_words
    from knowgate.runs.columns import FACTS
    from knowgate.runs.given import Run, Runs, open_run, run_paths
    from knowgate.runs.inside import AGREED, name_inside
    from knowgate.runs.needs import RecordedNeeds, read_needs, write_needs
    from knowgate.runs.readings import question_of, recorded, recorded_layers
    from knowgate.runs.row_folder import RowFolder, disk_error
    from knowgate.runs.rows import GradedAnswer, LabelRow, side_of, to_json
    from knowgate.runs.run_folder import RunFolder, settings_hash
    from knowgate.runs.slices import DIMENSIONS, FREQUENCY, THIRDS, frequency_thirds, slice_values
    from knowgate.runs.split import Split, hashed_share, held_out, loose_key, question_key, seen_key, split_questions
    from knowgate.runs.together import check_named_once, names_of
    from knowgate.runs.trial import HELD, USUAL_ROUNDS, Trial, load_trial, tell_unfinished
    from knowgate.runs.usefulness import RecordedUse, read_use, write_use
    from knowgate.runs.whose import RECORDED, how_to_answer, how_to_ask, use_with_its_own
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "AGREED",
    "AGREEMENT",
    "DIMENSIONS",
    "FACTS",
    "FREQUENCY",
    "GradedAnswer",
    "HELD",
    "LabelRow",
    "RECORDED",
    "RecordedBeliefs",
    "RecordedNeeds",
    "RecordedUse",
    "RowFolder",
    "Run",
    "RunFolder",
    "Runs",
    "Split",
    "THIRDS",
    "Trial",
    "USUAL_ROUNDS",
    "cautions",
    "cautions_of",
    "check_named_once",
    "count_synthetic",
    "disk_error",
    "frequency_thirds",
    "hashed_share",
    "held_out",
    "how_to_answer",
    "how_to_ask",
    "load_trial",
    "loose_key",
    "name_inside",
    "names_of",
    "needs_of",
    "open_run",
    "question_key",
    "question_of",
    "read_beliefs",
    "read_needs",
    "read_use",
    "recorded",
    "recorded_layers",
    "run_paths",
    "seen_key",
    "settings_hash",
    "side_of",
    "slice_values",
    "split_questions",
    "synthetic_words",
    "tell_unfinished",
    "to_json",
    "use_with_its_own",
    "write_beliefs",
    "write_needs",
    "write_use",
]
