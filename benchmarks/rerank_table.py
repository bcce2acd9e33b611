"""The reranker table: BM25 order, base, aligned and oracle on held-out preferences, and the LLM's answers.

    python benchmarks/rerank_table.py --pref PREF [--pref PREF ...] --work DIR --out benchmarks/runs/rerank

PREF: folders made by `knowgate prefer`, with their train and test questions. Training, scores and answers are kept in
the work folder, so an interrupted run goes on. What is written to --out holds no questions and no passages.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from knowgate.evaluation.reranking.answers import Answering
from knowgate.evaluation.reranking.rankers import compare_rankers, markdown, summary
from knowgate.files import read_jsonl, sha256_text, write_json, write_text
from knowgate.fitting.reranker.alignment import fit_reranker
from knowgate.fitting.reranker.relevance import questions_of, relevance_groups
from knowgate.fitting.reranker.save import save_reranker
from knowgate.fitting.reranker.training import RerankStep, RerankTraining
from knowgate.labels.grading import StringGrader
from knowgate.models import load_model
from knowgate.preferences.record import Preference, PreferenceFolder, data_hash
from knowgate.rerank.cross_encoder import CrossEncoderReranker, shown
from knowgate.rerank.manifest import BASE, MANIFEST
from knowgate.types import Passage

START = time.perf_counter()


def say(*words: object) -> None:
    print(f"{time.perf_counter() - START:7.1f} s ", *words, flush=True)


class Kept:
    """A reranker whose scores are kept in a file."""

    def __init__(self, folder: Path, file: Path):
        self.reranker, self.file, self.name = CrossEncoderReranker(str(folder)), file, folder.name

    @functools.cached_property
    def known(self) -> dict[str, float]:
        if not self.file.is_file():
            return {}
        return {str(record["key"]): float(record["score"]) for _, record in read_jsonl(self.file)}

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        keys = [[sha256_text(q, shown(p))[:24] for p in found] for q, found in zip(questions, passages, strict=True)]
        missing = [
            [p for p, key in zip(found, row, strict=True) if key not in self.known]
            for found, row in zip(passages, keys, strict=True)
        ]
        fresh = [value for row in self.reranker.score(questions, missing) for value in row]
        wanted = [key for row in keys for key in row if key not in self.known]
        with self.file.open("a") as out:
            out.writelines(
                json.dumps({"key": k, "score": s}) + "\n" for k, s in dict(zip(wanted, fresh, strict=True)).items()
            )
        self.known.update(zip(wanted, fresh, strict=True))
        return [[self.known[key] for key in row] for row in keys]


class Shortest:
    """A control: shorter passages first. Whatever it reaches, length alone reaches."""

    name = "shortest first"

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return [[-float(len(passage.text)) for passage in found] for found in passages]


class Unread:
    """A control that never reads the question: a passage's mean shift over the training questions, 0 if it has none."""

    name = "question unread"

    def __init__(self, rows: Sequence[Preference]):
        shifts: dict[str, list[float]] = {}
        for candidate in (one for row in rows for one in row.candidates):
            shifts.setdefault(candidate.id, []).append(candidate.shift)
        self.means = {name: float(np.mean(found)) for name, found in shifts.items()}

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return [[self.means.get(passage.id, 0.0) for passage in found] for found in passages]

    def seen(self, rows: Sequence[Preference]) -> float:
        """Share of the rows' candidates that training questions had too."""
        return float(np.mean([candidate.id in self.means for row in rows for candidate in row.candidates]))


def drawn(items: Sequence[Any], n: int, seed: int = 0) -> list[Any]:
    places = np.random.default_rng(seed).permutation(len(items))[:n]
    return [items[int(place)] for place in sorted(places)]


def train(rows: Sequence[Preference], settings: dict[str, Any], options: argparse.Namespace) -> Path:
    """The base and the aligned reranker, unless an earlier start made them."""
    out: Path = options.work / "aligned"
    if (out / MANIFEST).is_file():
        return out
    learnt = [row for row in rows if row.split == "train" and row.error is None]
    relevance = drawn(relevance_groups(questions_of(learnt)), options.relevance_groups)
    chosen = drawn([row for row in learnt if row.is_kept], options.groups)
    say(f"{len(relevance)} groups for relevance, {len(chosen)} for alignment")

    def watch(stage: str, step: RerankStep) -> None:
        say(stage, f"{step.done}/{step.total}", f"loss {step.loss:.3f}", f"{step.rate:.2f} groups/s")

    fitted = fit_reranker(
        chosen,
        training=RerankTraining(batch=options.batch, rate=options.rate),
        relevance=relevance,
        first=RerankTraining(batch=options.batch, rate=options.relevance_rate),
        watch=watch,
    )
    save_reranker(fitted, out, settings=settings, data_hash=data_hash(chosen))
    return out


def score(rows: Sequence[Preference], rerankers: Sequence[Kept], seconds: float, whole: int) -> list[Preference]:
    """As many rows as can be scored in the time; the first `whole` with all candidates, later ones with their pool."""
    start, done = time.perf_counter(), list[Preference]()
    for place in range(0, len(rows), 10):
        if done and place >= whole and time.perf_counter() - start > seconds:
            break
        part = [row if place < whole else row.only_pool() for row in rows[place : place + 10]]
        for reranker in rerankers:
            reranker.score([row.question for row in part], [[c.passage for c in row.candidates] for row in part])
        done += part
        say(f"scored {len(done)} of {len(rows)} questions")
    return done


def paragraph(found: dict[str, Any]) -> str:
    """What was trained on what, and what the differences say."""
    reranker, device = found["reranker"], found["device"]
    relevance, alignment = reranker["losses"]["relevance"], reranker["losses"]["alignment"]
    training, aligned = reranker["training"], reranker["aligned_to"]
    gains = [
        _gain(found, measure) for measure in found["differences"] if measure in ("P@1", "MRR@5") or "acc" in measure
    ]
    return (
        f"Preferences: {aligned['source']} shifts of {aligned['model']}, {aligned.get('retriever', 'own')} candidates. "
        f"The base is the packaged MiniLM trained on relevance with {relevance['groups']} questions "
        f"({relevance['seconds']:.0f} s, rate {found['relevance_rate']:g}), "
        f"aligned with {training['loss']} on {alignment['groups']} questions "
        f"({alignment['seconds']:.0f} s; rate {training['rate']:g}, batch {training['batch']}, {training['epochs']} "
        f"epoch; the paper's rate is 6e-05), both on {device}. The paper aligns a reranker already strong on relevance "
        "with 7,622 questions; this is a small part of that: figures of a short run, not of what alignment can reach. "
        f"Gain of alignment over the base: {'; '.join(gains)}.{_answers(found)}"
    )


def _answers(found: dict[str, Any]) -> str:
    """The LLM's accuracy with each ranker's passages against the retriever's own order."""
    said = [
        f"{measure}: {_gain(found, measure, name, 'retriever')}"
        for measure in found["differences"]
        for name in ("aligned", "oracle")
        if measure.startswith("accuracy")
    ]
    if not said:
        return ""
    n = found["questions_answered"]
    return f" The LLM's answers on {n} questions, against the retriever's order: {'; '.join(said)}."


def _gain(found: dict[str, Any], measure: str, name: str = "aligned", other: str = "base") -> str:
    value = found["differences"][measure][f"{name} - {other}"]
    clear = "" if value["low"] > 0 or value["high"] < 0 else ", not told apart from none"
    what = measure if other == "base" else name
    return f"{what} {value['value']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]{clear}"


def caution(found: dict[str, Any]) -> str:
    """What the controls say about the tables above."""
    controls = found["controls"]
    values = {name: value["value"] for name, value in controls["values"]["P@1"].items()}
    pairs = [controls["differences"]["P@1"][f"aligned - {name}"] for name in ("shortest first", "question unread")]
    short, blind = (f"{pair['value']:+.3f} [{pair['low']:+.3f}, {pair['high']:+.3f}]" for pair in pairs)
    return (
        f"Neither control reads the question. The shortest passage first has P@1 {values['shortest first']:.3f}, a "
        f"passage's mean shift over the training questions {values['question unread']:.3f} ({controls['seen']:.0%} of "
        "the held-out candidates are candidates of training questions too: both search one corpus; the questions are "
        f"different). The aligned reranker's P@1 less that of the first: {short}; less that of the second: {blind}. So "
        "far as a control reaches it, a gain in the ranking measures says that the probe's confidence follows the "
        "passage itself (short ones raise it), not that the passage answers the question: only the LLM's answers can "
        "tell whether alignment helps."
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pref", type=Path, action="append", required=True, help="preference folder; repeat it")
    arguments.add_argument("--work", type=Path, required=True, help="where training, scores and answers are kept")
    arguments.add_argument("--out", type=Path, required=True, help="path of the .md and .json without their endings")
    arguments.add_argument("--relevance-groups", type=int, default=160, help="questions the base learns relevance from")
    arguments.add_argument("--relevance-rate", type=float, default=1e-4, help="learning rate of that stage")
    arguments.add_argument("--groups", type=int, default=160, help="questions the reranker is aligned on")
    arguments.add_argument("--rate", type=float, default=6e-5, help="learning rate of the alignment")
    arguments.add_argument("--batch", type=int, default=4, help="questions in a step")
    arguments.add_argument("--score-seconds", type=float, default=300, help="for ranking held-out questions")
    arguments.add_argument("--answers", type=int, default=50, help="held-out questions the LLM answers")
    arguments.add_argument("--shown", type=int, nargs="+", default=[1, 3], help="passages the LLM answers with")
    arguments.add_argument("--model", default="smollm", help="the LLM that answers")
    options = arguments.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    folders = [PreferenceFolder(path) for path in options.pref]
    rows = [row for folder in folders for row in folder.rows()]
    settings = folders[0].manifest()["settings"]
    aligned = train(rows, settings, options)
    rerankers = {
        "base": Kept(aligned / BASE, options.work / "scores-base.jsonl"),
        "aligned": Kept(aligned, options.work / "scores-aligned.jsonl"),
    }
    held = [row for row in rows if row.split == "test" and row.error is None and row.candidates]
    scored = score(held, list(rerankers.values()), options.score_seconds, options.answers)
    found = summary(compare_rankers(scored, rerankers))
    if options.answers:
        llm = load_model(options.model)
        answering = Answering(
            llm, StringGrader(), options.work / "answers.jsonl", on_answers=lambda n: say(n, "answers")
        )
        asked = scored[: options.answers]
        answered = summary(compare_rankers(asked, rerankers, answering=answering, shown=options.shown, on_progress=say))
        found["questions_answered"] = answered["questions_answered"]
        for part in ("values", "differences"):
            found[part] |= {name: value for name, value in answered[part].items() if name.startswith("accuracy")}
    unread = Unread([row for row in rows if row.split == "train"])
    controls = {"shortest first": Shortest(), "question unread": unread, "aligned": rerankers["aligned"]}
    found["controls"] = summary(compare_rankers(scored, controls))
    found["controls"]["seen"] = unread.seen(scored)
    manifest = json.loads((aligned / MANIFEST).read_text())
    found["reranker"] = {key: manifest[key] for key in ("base", "aligned_to", "data", "training", "losses", "cut")}
    found["relevance_rate"] = options.relevance_rate
    found["device"] = "a GPU" if torch.cuda.is_available() else "a CPU"
    write_json(options.out.with_suffix(".json"), found)
    parts = [
        markdown(found, "Rerankers on held-out preferences"),
        paragraph(found),
        markdown(found["controls"], "Controls").replace("# ", "## ", 1),
        caution(found),
    ]
    write_text(options.out.with_suffix(".md"), "\n".join(part.rstrip("\n") + "\n" for part in parts))
    say(f"written to {options.out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
