"""How many follow-up questions keep their meaning when they are rewritten to stand alone.

    python -m benchmarks.follow_ups [--model smollm] [--json]

The 40 follow-ups are in `first_hour/follow_ups.jsonl`. Twenty (`development`) were written before the checks in
`knowgate.pipeline.conversation` were chosen, twenty (`blind`) after they were frozen, and no setting was changed since.
A rewrite keeps its meaning if

- it contains the content words of the follow-up (`keep`; `a|b` allows either),
- it contains the subject of the earlier question (`subject`: one of them),
- it ends as a question.

Rows with `alone` are new questions in the middle of a conversation, which must stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from knowgate.models import load_model
from knowgate.models.prompts.questions import Exchange
from knowgate.pipeline.conversation import rewrite_follow_up

ROWS = Path(__file__).parent / "first_hour" / "follow_ups.jsonl"


def contains(text: str, phrase: str) -> bool:
    """Return whether a text contains a phrase at the beginning of a word, in any case; `a|b` allows either."""
    alternatives = [re.escape(part) for part in phrase.split("|")]
    boundary = r"\b" if phrase.isascii() else ""
    return re.search(f"{boundary}(?:{'|'.join(alternatives)})", text, re.IGNORECASE) is not None


def keeps_meaning(rewritten: str, row: dict[str, Any]) -> bool:
    """Check a rewritten follow-up by the rules of this benchmark."""
    if row.get("alone"):
        return rewritten == row["follow_up"]
    has_subject = any(contains(rewritten, phrase) for phrase in row["subject"])
    return has_subject and all(contains(rewritten, phrase) for phrase in row["keep"]) and rewritten[-1] in "?？"


def measure(spec: str) -> list[dict[str, Any]]:
    """Rewrite every follow-up with a model and check it."""
    model = load_model(spec)
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["rewritten"] = rewrite_follow_up(model, [Exchange(row["question"], row["answer"])], row["follow_up"])
        row["kept"] = keeps_meaning(row["rewritten"], row)
        row["by"] = "joined" if row["rewritten"].startswith(row["question"]) else "rewritten"
    return rows


def main() -> None:
    """Print the share of follow-ups that keep their meaning, by set, and those that do not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm")
    parser.add_argument("--json", action="store_true", help="Print every row as JSON.")
    options = parser.parse_args()
    rows = measure(options.model)
    if options.json:
        print("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
        return
    for name in dict.fromkeys(row["set"] for row in rows):
        chosen = [row for row in rows if row["set"] == name]
        joined = sum(row["by"] == "joined" for row in chosen)
        print(f"{name}: {sum(row['kept'] for row in chosen)} of {len(chosen)} keep their meaning ({joined} joined)")
    for row in rows:
        if not row["kept"]:
            print(f"  {row['set']}: {row['question']} / {row['follow_up']} -> {row['rewritten']}")


if __name__ == "__main__":
    main()
