"""Graders compared: people, `contains` and `exact` on the same answers: `python -m benchmarks.graders`.

    KNOWGATE_BENCH=... python -m benchmarks.graders --record    # grade the recorded answers again and write the record
    KNOWGATE_BENCH=... python -m benchmarks.graders --judge hf:FOLDER [--verdicts FILE]    # let an LLM grade, on a GPU

People graded the answers of GPT-4, ChatGPT, text-davinci-003 and Bing Chat to NQ, and so does an LLM. The answers of
Qwen2.5-Coder-1.5B have no grades of people; there the two string graders are compared with each other.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.tables.common import QWEN, RUNS, Rows, table
from knowgate.types import Question

RECORD = RUNS / "graders.json"
GRADED_BY_PEOPLE = {"GPT-4": "gate_gpt4_nq", "ChatGPT 3.5": "gate_chatgpt_nq", "text-davinci-003": "gate_davinci3_nq"}
RUN_SETS = ("triviaqa_ctx", "nq_ctx", "squad_ctx", "webqa_zh_ctx", "freshqa")
JUDGE_STYLES: tuple[Literal["implies", "contains"], ...] = ("implies", "contains")
NAMES = ("people", "contains", "exact", *(f"LLM, {style}" for style in JUDGE_STYLES))
VERDICTS = RUNS / "graders_llm.jsonl.gz"


def read_questions(bench: Path, data: str, split: str = "test") -> Iterator[tuple[Question, dict[str, Any]]]:
    """Read the questions of a data set with their meta data."""
    with gzip.open(bench / data / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Question(row["question"], id=row["id"], answers=tuple(row["answers"])), row.get("meta", {})


def grade_by_strings(answers: Sequence[str], questions: Sequence[Question]) -> dict[str, list[bool]]:
    """Grade answers by both string graders."""
    from knowgate.labels.grading import StringGrader

    graders = {"contains": StringGrader("contains"), "exact": StringGrader("exact")}
    return {
        name: [bool(grade.correct) for grade in grader.grade(answers, questions)] for name, grader in graders.items()
    }


def summarize(llm: str, data: str, grades: dict[str, list[bool]]) -> dict[str, Any]:
    """Summarize grades: share right by each grader, agreement and Cohen's kappa of each pair."""
    from knowgate.stats.proportions import measure_agreement

    names = [name for name in NAMES if name in grades]
    pairs = {}
    for second in names[1:]:
        verdicts = list(zip(grades[names[0]], grades[second], strict=True))
        agreement = measure_agreement("both", (names[0], second), verdicts)
        pairs[f"{names[0]} / {second}"] = {"agree": agreement.agree, "kappa": agreement.kappa}
    shares = {name: sum(grades[name]) / len(grades[name]) for name in names}
    return {"llm": llm, "data": data, "n": len(grades[names[0]]), "right": shares, "agreement": pairs}


@dataclass(frozen=True)
class GradedAnswers:
    """Answers of an LLM that people graded."""

    llm: str
    questions: Sequence[Question]
    answers: Sequence[str]
    people: Sequence[bool]


def read_answers_graded_by_people(bench: Path) -> Iterator[GradedAnswers]:
    """Read the answers to NQ with the grades of people."""
    for llm, data in GRADED_BY_PEOPLE.items():
        rows = list(read_questions(bench, data))
        for name, side, key in ((llm, "nor", "pred_no_retrieval"), ("Bing Chat", "oner", "pred_one_retrieval")):
            if side == "nor" or llm == "GPT-4":
                answers = [str(meta[key] or "") for _, meta in rows]
                people = [bool(meta["correct"][side]) for _, meta in rows]
                yield GradedAnswers(name, [question for question, _ in rows], answers, people)


def write_llm_verdicts(bench: Path, judge: str, file: Path, limit: int | None = None) -> None:
    """Let an LLM grade the answers that people graded; writes one line for each LLM and prompt."""
    from knowgate.labels.grading import JudgeGrader
    from knowgate.models import load_model

    model = load_model(judge)
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        for graded in read_answers_graded_by_people(bench):
            for style in JUDGE_STYLES:
                start = time.perf_counter()
                grades = JudgeGrader(model, style).grade(graded.answers[:limit], graded.questions[:limit])
                verdicts = "".join("?" if grade.correct is None else str(int(grade.correct)) for grade in grades)
                seconds = round(time.perf_counter() - start, 1)
                line = {
                    "llm": graded.llm,
                    "style": style,
                    "judge": model.name,
                    "seconds": seconds,
                    "verdicts": verdicts,
                }
                lines.write(json.dumps(line) + "\n")
                print(graded.llm, style, f"{seconds} s, {verdicts.count('?')} unreadable", flush=True)


def read_llm_verdicts(file: Path = VERDICTS) -> dict[str, dict[str, list[bool]]]:
    """Read the LLM's verdicts by the LLM that answered; verdicts that are neither yes nor no count as no."""
    verdicts: dict[str, dict[str, list[bool]]] = {}
    if file.is_file():
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                verdicts.setdefault(line["llm"], {})[f"LLM, {line['style']}"] = [
                    mark == "1" for mark in line["verdicts"]
                ]
    return verdicts


def record_all(bench: Path) -> list[dict[str, Any]]:
    """Grade all recorded answers again."""
    from knowgate.data.runs.folder import RunFolder

    results, verdicts = [], read_llm_verdicts()
    for graded in read_answers_graded_by_people(bench):
        grades = {"people": list(graded.people), **grade_by_strings(graded.answers, graded.questions)}
        results.append(summarize(graded.llm, "NQ", grades | verdicts.get(graded.llm, {})))
    for data in RUN_SETS:
        questions = {question.id: question for question, _ in read_questions(bench, data)}
        rows = [row for row in RunFolder(RUNS / QWEN / f"{data}-test").rows() if row.id in questions]
        for side in ("closed", "open"):
            answered = [row for row in rows if getattr(row, side) is not None]
            if answered:
                texts = [getattr(row, side).text for row in answered]
                grades = grade_by_strings(texts, [questions[row.id] for row in answered])
                results.append(summarize(QWEN, f"{data}, {side}-book", grades))
    return results


def graders_table() -> Iterator[str]:
    """The section on graders; nothing without a record."""
    if not RECORD.is_file():
        return
    yield "## Graders compared\n"
    yield (
        "Share of answers that each grader calls right, and how often it agrees with people (Cohen's kappa "
        "in brackets), or how often the string graders agree where no people graded. `contains` grades the answers of Qwen "
        "and SmolLM2 in all other tables, and those of GPT-3. People graded those of GPT-4, ChatGPT and text-davinci-003. "
        "Llama-3.1-8B and Llama-4 have the grades of their data sets, if a page does not say otherwise. "
        "*LLM*: Qwen2.5-Coder-1.5B grades, with the packaged prompts `implies` and `contains`. The KBM paper has "
        "a 72B LLM as grader for Chinese; here, no LLM graded Chinese answers.\n\n"
        "The LLM with the prompt `contains` agrees with people on 85 to 89 % of the answers, the string grader `contains` on 73 "
        "to 85 %; but it calls 31 to 48 % of the wrong answers right, so its kappa is clearly higher only for Bing Chat "
        "(.56 against .42). Use it to compare long answers with and without search: from GPT-4 to Bing Chat people see +0.1 "
        "points, the LLM +1.2 and strings -5.3; for short answers the free string grader is enough.\n\n"
        "Long answers are graded too strictly by strings: `contains` calls 15 to 23 points fewer answers right than "
        "people, and misses more of those with search (Bing Chat) than of those from memory (GPT-4), so it understates "
        "what retrieval is worth. `exact` is useless for sentences. For the short answers of Qwen2.5-Coder-1.5B the two "
        "string graders agree on nine answers in ten or more, and the order of closed-book and open-book stays.\n"
    )
    rows: Rows = []
    lines = json.loads(RECORD.read_text(encoding="utf-8"))
    names = [name for name in NAMES if any(name in line["right"] for line in lines)]
    for line in lines:
        shares = (f"{100 * line['right'][name]:.1f} %" if name in line["right"] else "–" for name in names)
        agreement = "; ".join(
            f"{pair}: {100 * each['agree']:.1f} %" + ("" if each["kappa"] is None else f" ({each['kappa']:.2f})")
            for pair, each in line["agreement"].items()
        )
        rows.append((line["llm"], line["data"], str(line["n"]), *shares, agreement))
    yield table(("LLM", "answers to", "n", *names, "agreement (kappa)"), rows)


def main() -> None:
    """Print the table, or write the record first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="grade the answers and write the record")
    parser.add_argument("--judge", help="model spec of the LLM that grades")
    parser.add_argument("--verdicts", type=Path, default=VERDICTS, help="file for its verdicts")
    parser.add_argument("--limit", type=int, help="answers of each LLM, for rehearsals")
    options = parser.parse_args()
    if options.judge:
        write_llm_verdicts(Path(os.environ["KNOWGATE_BENCH"]), options.judge, options.verdicts, options.limit)
        return
    if options.record:
        results = record_all(Path(os.environ["KNOWGATE_BENCH"]))
        RECORD.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(graders_table()))


if __name__ == "__main__":
    main()
