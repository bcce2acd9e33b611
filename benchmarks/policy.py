"""Policies for recorded LLMs, from committed predictions: never, always, and what `knowgate fit` would choose.

    python -m benchmarks.policy            # tables
    python -m benchmarks.policy --json     # one object per recorded LLM, and one for mixed traffic
    python -m benchmarks.policy --train    # the choices on train rows only

No GPU, no LLM and no benchmark data are needed. `policy_protocol.md` says what is computed; it was written before any
prediction for a test row existed.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.policy_evaluation import evaluate_all, list_train_choices
from benchmarks.tables.policy import policy_tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--train", action="store_true", help="show the choices on train rows and stop")
    options = parser.parse_args()
    if options.train:
        print("\n".join(list_train_choices()))
    elif options.json:
        print(json.dumps(evaluate_all(), indent=1))
    else:
        print("\n".join(policy_tables()))


if __name__ == "__main__":
    main()
