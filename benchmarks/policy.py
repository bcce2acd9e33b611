"""Policies for recorded LLMs, from committed predictions: never, always, and what `knowgate fit` would choose.

    python -m benchmarks.policy            # tables
    python -m benchmarks.policy --json     # one object per recorded LLM, and one for mixed traffic
    python -m benchmarks.policy --train    # the choices on train rows only

No GPU, no LLM and no benchmark data are needed. `policy_protocol.md` says what is computed, and what was seen before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from benchmarks.policy_evaluation import evaluate_all, list_train_choices
from benchmarks.tables.policy import policy_tables


def main() -> None:
    """Print the tables, the JSON object or the choices; stop quietly if the reader closes the pipe (`| head`)."""
    try:
        print(render())
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no second error at exit


def render() -> str:
    """Return the text that the command-line options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--train", action="store_true", help="show the choices on train rows and stop")
    options = parser.parse_args()
    if options.train:
        return "\n".join(list_train_choices())
    if options.json:
        return json.dumps(evaluate_all(), indent=1)
    return "\n".join(policy_tables())


if __name__ == "__main__":
    main()
