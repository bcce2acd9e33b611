"""An 8B LLM behind an API: never, always, judge, arbiter and cascade, from committed predictions. No GPU, no LLM.

    python benchmarks/judge.py [--json] [--predictions NAME] [--svg FILE] [--summary FILE]
    python benchmarks/judge.py --record        # answers.jsonl.gz anew, from the data set (KNOWGATE_BENCH)
    python benchmarks/judge.py --into RUN      # what was predicted, beside the rows of a label run of the test split
    knowgate eval --labels RUN --gates judge --arbiter judge

`judge_train.py` makes the predictions on a GPU and `judge_blend.py` puts several together; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.judge_answers import ANSWERS, HOME, judge_names, read_judge, record
from benchmarks.judge_cascade import chosen_judge, headline, keep_predictions
from benchmarks.judge_summary import write_summary
from benchmarks.tables.judge import figure, judge_tables

BEST = "judges"  # the blend of judges that tells best on dev rows what is known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=HOME, help="folder of answers.jsonl.gz and judge/")
    parser.add_argument("--predictions", help="name of the predictions; default: cascade, or the best on dev rows")
    parser.add_argument("--json", action="store_true", help="the headline numbers as one JSON object")
    parser.add_argument("--svg", type=Path, help="draw the figure into this file")
    parser.add_argument("--summary", type=Path, help="write what `knowgate demo` shows into this file, and stop")
    parser.add_argument("--record", action="store_true", help="write answers.jsonl.gz from the data set")
    parser.add_argument("--into", type=Path, help="label run of the test split that gets needs and beliefs")
    options = parser.parse_args()
    if options.record:
        record(options.home / ANSWERS)
        return
    judges = {name: read_judge(options.home, name) for name in judge_names(options.home)}
    chosen = chosen_judge(judges, options.predictions)
    if chosen is None:
        sys.exit(f"there are no predictions with known, closed and open in {options.home}: see benchmarks/README.md.")
    if options.svg:
        options.svg.write_text(figure(chosen), encoding="utf-8")
    if options.summary:
        write_summary(chosen, options.summary)
        return
    if options.into:
        keep_predictions(chosen, options.into)
        return
    print(
        json.dumps(headline(chosen, judges.get(BEST)))
        if options.json
        else "\n".join(judge_tables(options.home, options.predictions))
    )


if __name__ == "__main__":
    main()
