"""What the gate `tool` (the LLM decides itself, by a tool call) does for Qwen2.5-Coder-1.5B, on train rows of its NQ label run.

    python -m benchmarks.tool_gate [--json]                    tables, from the committed record
    KNOWGATE_BENCH=... python -m benchmarks.tool_gate --record MODEL [--n 76]     half an hour on a CPU for 1.5B parameters

Nothing is fitted or chosen on these rows. The LLM is offered a search tool in its chat template, and the need is the probability
that its answer begins with the token of a call. The questions share the long beginning of the prompt, which is computed once.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.files import sha256_text
from knowgate.stats.bootstrap import estimate_auroc, estimate_mean

RUN = Path(__file__).parent / "runs" / "qwen2.5-coder-1.5b"
RECORD = RUN / "tool.jsonl"
DATA = ("nq_ctx",)


def read_grades(data: str) -> dict[str, tuple[bool, bool, float]]:
    """Return whether the closed-book and the open-book answer are right, and `logprob:min`, by row id."""
    with gzip.open(RUN / f"{data}-train" / "labels.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row.get("closed") and row.get("open")]
    return {
        row["id"]: (
            bool(row["closed"]["correct"]),
            bool(row["open"]["correct"]),
            -min((token[1] for token in row["closed"]["tokens"]), default=0.0),
        )
        for row in rows
    }


def select_ids(data: str, n: int) -> list[str]:
    """Return n ids of a label run, in an order that depends on nothing but the ids."""
    return sorted(read_grades(data), key=lambda name: sha256_text("tool", name))[:n]


# --- record ---------------------------------------------------------------------------------------


def record(spec: str, n: int) -> None:
    """Ask the LLM about n questions of each data set and append to the record; rows that it holds are not asked again."""
    from knowgate.data.questions import load_questions
    from knowgate.models import load_model

    done = {row["id"] for row in read_record()}
    model: Any = load_model(spec)
    for data in DATA:
        texts = {question.id: question.text for question in load_questions(f"bench:{data}/train")}
        ids = [name for name in select_ids(data, n) if name not in done]
        with RECORD.open("a", encoding="utf-8") as file:
            for name, need in zip(ids, score_calls(model, [texts[name] for name in ids]), strict=True):
                file.write(json.dumps({"id": name, "data": data, "need": round(need, 6)}) + "\n")
                file.flush()


def score_calls(model: Any, questions: list[str]) -> Iterator[float]:
    """Yield the probability of a tool call for each question; the beginning that all prompts share is computed once."""
    import torch

    from knowgate.models.tools import SEARCH_TOOL, find_call_token, render_with_tool

    tokenizer, network = model.tokenizer, model.loaded.model
    call = find_call_token(tokenizer, SEARCH_TOOL, model.name)
    prompts = [model.tokenize(render_with_tool(tokenizer, text, SEARCH_TOOL, model.name)) for text in questions]
    shared = next(i for i in range(len(prompts[0])) if len({tuple(ids[: i + 1]) for ids in prompts}) > 1)
    with torch.inference_mode():
        start = network(input_ids=torch.tensor([prompts[0][:shared]]), use_cache=True).past_key_values
        for ids in prompts:
            output = network(input_ids=torch.tensor([ids[shared:]]), past_key_values=copy.deepcopy(start))
            yield math.exp(torch.log_softmax(output.logits[0, -1].float(), dim=-1)[call])


# --- tables ---------------------------------------------------------------------------------------


def read_record() -> list[dict[str, Any]]:
    """Read the recorded needs."""
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.exists() else []


def describe(data: str) -> dict[str, Any]:
    """Describe what the gate does: AUROC of wrong from memory, and answers if the LLM's own decision (P > .5) counts."""
    grades = read_grades(data)
    rows = [row for row in read_record() if row["data"] == data]
    needs = np.array([row["need"] for row in rows])
    closed, opened, logprob = (np.array([grades[row["id"]][i] for row in rows]) for i in range(3))
    calls = needs > 0.5
    right = np.where(calls, opened, closed)
    random = closed + calls.mean() * (opened.astype(float) - closed)
    scores = {"tool": needs, "logprob:min": logprob}
    return {
        "n": len(rows),
        "never": float(closed.mean()),
        "always": float(opened.mean()),
        "searches": float(calls.mean()),
        "right": float(right.mean()),
        "random": float(random.mean()),
        "against_random": to_json(estimate_mean(right - random)),
        "auroc": {name: to_json(estimate_auroc(~closed, values, 1000)) for name, values in scores.items()},
    }


def to_json(estimate: Any) -> dict[str, float]:
    """Return value and interval."""
    return {"value": float(estimate.value), "low": float(estimate.low), "high": float(estimate.high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="MODEL", help="ask this LLM, such as gguf:FILE")
    parser.add_argument("--n", type=int, default=76, help="questions of each data set")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if options.record:
        record(options.record, options.n)
        return
    results = {data: describe(data) for data in DATA}
    if options.json:
        print(json.dumps(results))
        return
    print(
        "| data | n | never | always | calls the tool | right | random | against random | AUROC tool | AUROC logprob:min |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for data, item in results.items():
        gain = item["against_random"]
        interval = f"{100 * gain['value']:+.1f} [{100 * gain['low']:+.1f}, {100 * gain['high']:+.1f}]"
        shares = " | ".join(f"{item[name]:.1%}" for name in ("never", "always", "searches", "right", "random"))
        aurocs = " | ".join(
            f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]" for score in item["auroc"].values()
        )
        print(f"| {data.split('_')[0]} | {item['n']} | {shares} | {interval} | {aurocs} |")


if __name__ == "__main__":
    main()
