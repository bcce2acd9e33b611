"""Policies that `knowgate fit` chose, on test rows of label runs.

    python -m benchmarks.policy_fits --record NAME --policy FOLDER --labels RUN [--labels RUN ...]

Records what a fitted policy does to the rows of label runs, without texts. In a record, `closed` and `open` say whether the
answer without and with passages is right; `rules` and `chosen` say whether the rules and the policy's arbiter give the closed
answer.
`policy_protocol.md` says on which rows ("Local LLMs and private documents", "The command itself"). `python -m
benchmarks.policy` prints the results.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.training.policy.outcomes import ALWAYS

HOME = Path(__file__).parent / "runs" / "policy"
FACTS = HOME / "fits.json"
TITLES = {
    "fit_qwen": "Qwen2.5-Coder-1.5B, four data sets",
    "fit_smollm": "SmolLM2-135M, four data sets",
    "fit_handbook": "Qwen2.5-Coder-1.5B, handbook, free-form answers",
}
# What `knowgate fit` chose on the train rows of recorded LLMs: the name of the record, or "" for *always*, which needs none.
COMMAND_CHOICES = {
    "llama3_8b": "fit_llama3_8b",
    "gpt4_nq": "",
    "chatgpt_nq": "",
    "davinci3_nq": "",
    "gpt3_realtimeqa": "",
    "mixed": "",
}
ALWAYS_FACTS = {
    "gate": ALWAYS,
    "arbiter": "",
    "threshold": -1.0,
    "models": 0,
    "reads_draft": False,
    "reason": "chosen for this LLM on other questions",
}
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class FittedRows:
    """Test rows of a fitted policy.

    Attributes:
        facts: Gate, arbiter, threshold and number of models of the policy, and how often the gate reads a draft.
        closed: Whether the closed-book answer is right.
        open: Whether the open-book answer is right.
        rules: Whether the free rules give the closed-book answer.
        chosen: Whether the policy's arbiter gives the closed-book answer.
        needs: Need of each row.
        sets: Data set of each row: its id up to the first underscore.
    """

    facts: dict[str, Any]
    closed: Bools
    open: Bools
    rules: Bools
    chosen: Bools
    needs: np.ndarray[Any, np.dtype[np.float64]]
    sets: np.ndarray[Any, np.dtype[np.str_]]


@cache
def load_fitted(name: str) -> FittedRows:
    """Read a record."""
    with gzip.open(HOME / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    columns = [np.array([bool(row[key]) for row in rows]) for key in ("closed", "open", "rules", "chosen")]
    sets = np.array([row["id"].partition("_")[0] for row in rows])
    return FittedRows(read_facts()[name], *columns, np.array([row["need"] for row in rows]), sets)


def read_facts() -> dict[str, Any]:
    """Read the facts about all recorded policies, by name of the record."""
    facts: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {}
    return facts


def list_fitted() -> list[str]:
    """List the records that exist."""
    return [name for name in TITLES if (HOME / f"{name}.jsonl.gz").exists()]


def describe_policy(policy: str) -> tuple[dict[str, Any], str]:
    """Return the facts about a fitted policy, and its arbiter."""
    from knowgate.gates import load_fitted_gate
    from knowgate.gates.arbiters import NO_ARBITER, get_policy_arbiter

    gate = load_fitted_gate(policy)
    chosen, arbiter = gate.artifact.manifest["policy"], get_policy_arbiter(policy) or NO_ARBITER
    arbiter_name = (gate.artifact.manifest["guarantee"]["arbiter"] or {"name": ""})["name"]
    tried = {(item["gate"], item["arbiter"]): item["models"] for item in chosen["tried"]}
    facts = {
        "gate": chosen["gate"],
        "arbiter": arbiter_name,
        "threshold": gate.threshold,
        "models": tried.get((chosen["gate"], arbiter_name), 0),
        "reads_draft": bool(gate.request.draft_tokens),
        "reason": chosen["reason"],
    }
    return facts, arbiter


def record(name: str, policy: str, runs: list[Path]) -> None:
    """Score rows with a policy and write the record."""
    from knowgate.data.runs.table import load_label_table
    from knowgate.gates.arbiters import NO_ARBITER
    from knowgate.gates.arbiters.offline_arbitration import arbitrate
    from knowgate.gates.offline_scoring import score_gate

    table = load_label_table(runs)
    both = [number for number, row in enumerate(table.rows) if row.open is not None and row.open.correct is not None]
    table = table.subset(both)
    facts, arbiter = (ALWAYS_FACTS, NO_ARBITER) if policy == ALWAYS else describe_policy(policy)
    needs = score_gate(table, policy).needs
    rules = arbitrate(table, "rules").from_memory
    chosen_closed_book = rules if arbiter == NO_ARBITER else arbitrate(table, arbiter).from_memory
    grades = zip(
        table.rows, needs, rules, chosen_closed_book, table.closed_book_right, table.retrieved_right, strict=True
    )
    rows = [
        {"id": row.id, "closed": int(c), "open": int(o), "rules": int(r), "chosen": int(a), "need": round(float(n), 5)}
        for row, n, r, a, c, o in grades
    ]
    with gzip.GzipFile(HOME / f"{name}.jsonl.gz", "wb", mtime=0) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    FACTS.write_text(json.dumps({**read_facts(), name: facts}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", choices=[*TITLES, *filter(None, COMMAND_CHOICES.values())], required=True)
    parser.add_argument("--policy", required=True, help="folder of a policy, or 'always'")
    parser.add_argument("--labels", type=Path, action="append", required=True)
    options = parser.parse_args()
    record(options.record, options.policy, options.labels)


if __name__ == "__main__":
    main()
