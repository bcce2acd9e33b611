"""Compare never, always, judge, arbiter and cascade for an 8B LLM behind an API, from committed predictions.

This needs neither a GPU nor an LLM.

    python benchmarks/judge.py [--json] [--predictions NAME] [--svg FILE] [--summary FILE]
    python benchmarks/judge.py --record        # write answers.jsonl.gz from the data set (KNOWGATE_BENCH)
    python benchmarks/judge.py --into RUN      # add the predictions to a label run of the test split
    knowgate eval --labels RUN --gates judge --arbiter judge

`judge_train.py` makes the predictions on a GPU and `judge_blend.py` averages several judges; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.judge_answers import ANSWERS, HOME, judge_names, read_judge, write_answers
from benchmarks.judge_cascade import add_predictions_to_run, choose_judge, headline
from benchmarks.judge_summary import write_summary
from benchmarks.tables.judge import figure, judge_tables

BEST_JUDGE = "judges"  # blend of judges with the highest AUROC before retrieval on dev rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=HOME, help="folder that contains answers.jsonl.gz and judge/")
    parser.add_argument("--predictions", help="name of the predictions; default: cascade, else the best on dev rows")
    parser.add_argument("--json", action="store_true", help="print the headline numbers as one JSON object")
    parser.add_argument("--svg", type=Path, help="write the figure to this file")
    parser.add_argument(
        "--summary", type=Path, help="write the summary that `knowgate demo` shows to this file, and stop"
    )
    parser.add_argument("--record", action="store_true", help="write answers.jsonl.gz from the data set")
    parser.add_argument("--into", type=Path, help="add needs and beliefs to this label run of the test split, and stop")
    options = parser.parse_args()
    if options.record:
        write_answers(options.home / ANSWERS)
        return
    judges = {name: read_judge(options.home, name) for name in judge_names(options.home)}
    chosen = choose_judge(judges, options.predictions)
    if chosen is None:
        sys.exit(f"no predictions with the columns known, closed and open in {options.home}. See benchmarks/README.md.")
    if options.svg:
        options.svg.write_text(figure(chosen), encoding="utf-8")
    if options.summary:
        write_summary(chosen, options.summary)
        return
    if options.into:
        add_predictions_to_run(chosen, options.into)
        return
    print(
        json.dumps(headline(chosen, judges.get(BEST_JUDGE)))
        if options.json
        else "\n".join(judge_tables(options.home, options.predictions))
    )


if __name__ == "__main__":
    main()
