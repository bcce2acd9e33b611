"""CBDR: rerankers aligned so that they first improve their own target. Every step is a `knowgate` command.

    python -m benchmarks.cbdr_alignment --model hf:FOLDER --bench FOLDER --work FOLDER --prepare       minutes on a CPU
    python -m benchmarks.cbdr_alignment --model hf:FOLDER --bench FOLDER --work FOLDER [--only NAME ...] [--print]
    python -m benchmarks.cbdr_alignment --model hf:FOLDER --bench FOLDER --work FOLDER --larger-base ROWS --tokenizer FOLDER

--prepare searches the candidates and writes WORK/data; the other steps need WORK/data only, not the benchmark folder.
Steps can run in several processes at once (`--only`), because each writes a folder of its own. Finished steps are
skipped, and interrupted ones resume. Results (tables, predictions by question id, manifests; no questions, no passages)
are written to WORK/out after the last step; `--only keep` writes them earlier. --larger-base writes the rows of the
second protocol, from WORK/data and the recorded effects, for `paper_training`.

Protocol, written before the run.

- *Questions.* Preferences are learned from train questions of NQ (1,702), HotpotQA (1,061) and TriviaQA (740). Test
  questions: 1,000 of NQ and all 940 of HotpotQA. Candidates: the first 8 passages of BM25 over the pooled corpora.
- *Sources.* Benefit (the LLM answers right with the passage) and likelihood (the passage makes the gold answer more
  likely). The earlier record (`runs/cbdr/rerank.json`) covers confidence.
- *Base.* MiniLM, taught which passages contain the answer by train questions of four data sets. Its weights are carried
  in 16 bits, those of the word embeddings in 8 bits; the training that follows changes all of them.
- *Recipes.* `paper`: one epoch at 6e-5, last weights (the recipe of the earlier record). The others keep the weights
  that rank 15 % of the train questions best, held out by a hash of the question (dev); the base and averages with it
  are among them, so that none is worse on dev than the base. `checked`: otherwise as `paper`. `gentle`: two epochs at
  2e-5, batches of 16. `mixed`: as `gentle`, with one relevance example per two preference examples.
- *Choice.* For each source, the recipe with the highest P@1 on dev questions, the first of equals. `paper` is never
  chosen; it is shown for comparison.
- *Test.* The base, the two chosen rerankers and the two of `paper` are measured on the test questions once: P@1 of both
  sources, and right answers with the first and the first three passages. Differences to the base are paired, with 95 %
  bootstrap intervals. Targets: P@1 of the own source above the base with an interval that excludes 0; then at least one
  more right answer in a hundred.

Protocol of the larger base, written before its run and after the results of the above were known.

- *Base.* Qwen2.5-Coder-1.5B with a LoRA adapter in place of MiniLM. It reads the question and one passage, and predicts with one
  linear head each: the passage contains the answer (*relevance*), the LLM answers right with it (*benefit*), the passage is
  among the positives of likelihood (*likelihood*). Questions, candidates and effects are those on record. A question
  teaches benefit or likelihood only if it has passages of both kinds.
- *Trainings* (`paper_training`), one epoch, batches of 64, rate 2e-4, not tuned. `relevance`: the relevance head alone; it
  is the base of this size. `aligned`: all three heads, with seeds 0, 1 and 2. `margin`: as `aligned`, but a negative counts
  only if it is a clear one: likelihood at least one nat below that of the question's best passage.
- *Dev.* 15 % of the train questions by a hash of the question; no training learns from them.
- *Choice.* For each source, the ranking by the source's head with the highest P@1 on dev questions, the first of equals:
  seed 0, the mean of the seeds (ensemble), `margin`, the mean of ensemble and `margin`. What is not finished is left out.
- *Test*, once: P@1 of both sources by `relevance` and the two chosen rankings, and right answers with the first passage,
  from the recorded effects. Differences to MiniLM's base, whose predictions are on record, and to `relevance` are paired.
  Targets as above, against MiniLM's base.

What was run, written after the test figures were known: `relevance`, `aligned` with seed 0, and `margin` (about 110 seconds
each on an H200). The GPU time ended before seeds 1 and 2, so the rankings to choose from are seed 0 and `margin`.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.steps import ENGLISH, Plan, Step, create_parser, prepare_work_folder, run_steps
from knowgate.evaluation import reranker_cache

SOURCES = ("benefit", "likelihood")
LEARNED = {"nq": 1_702, "hotpotqa": 1_061, "triviaqa": 740}
TESTED = {"nq": 1_000, "hotpotqa": 940}
RELEVANCE, CANDIDATES, SEARCHED = 1_500, 8, 20
POSITIVES, NEGATIVES = 2, 7  # passages of a relevance example
EFFECTS = Path(__file__).parent / "runs" / "cbdr" / "alignment" / "effects.jsonl.gz"
LARGER_BASE_ASKS = "Does the passage help to answer the question:"
MARGIN = 1.0  # nats of likelihood by which a clear negative is below the question's best passage
REFERENCE = "paper"
SLOW = ("--learning-rate", "2e-5", "--epochs", "2", "--batch", "16")
RECIPES: dict[str, tuple[str, ...]] = {
    "checked": (),
    "gentle": SLOW,
    "mixed": (*SLOW, "--relevance-mix", "0.5"),
    REFERENCE: ("--checks", "0"),
}


@dataclass(frozen=True)
class AlignmentPlan(Plan):
    """The steps of the comparison.

    Attributes:
        base: Cross-encoder that is trained on relevance.
        most: Maximum number of questions of any data set, to try the plan out.
    """

    base: str
    most: int

    def steps(self) -> Iterator[Step]:
        """Yield the steps. Those after the fits read the manifests that the fits wrote."""
        sets = [(name, "train") for name in LEARNED] + [(name, "test") for name in TESTED]
        yield from (self.label(*part) for part in sets)
        yield self.relevance()
        yield from (self.prefer(source, *part) for source in SOURCES for part in sets)
        yield from (self.fit(source, recipe) for recipe in RECIPES for source in SOURCES)
        yield self.compare()

    def label(self, name: str, split: str) -> Step:
        """Answer the questions without passages; `prefer` reads its questions from such a run."""
        words = ["label", "--data", f"bench:{name}_pooled/{split}", "--closed-book", "--model", self.model]
        words += [
            "--limit",
            str(self.most),
            "--samples",
            "0",
            "--layers",
            "none",
            "--out",
            self.path(f"{name}-{split}"),
        ]
        return Step(f"label-{name}-{split}", words)

    def relevance(self) -> Step:
        """Train the base reranker on relevance."""
        words = ["fit", "reranker", *self.relevance_data(), "--base", self.base, "--out", self.path("relevance")]
        return Step("relevance", words, self.work / "relevance")

    def relevance_data(self) -> list[str]:
        """Return the arguments that name the relevance examples."""
        data = [word for name in ENGLISH for word in ("--relevance", f"bench:{name}_relevance/train")]
        return [*data, "--limit", str(self.most)]

    def prefer(self, source: str, name: str, split: str) -> Step:
        """Measure the effect of every candidate passage."""
        words = ["prefer", "--labels", self.path(f"{name}-{split}"), "--data", f"bench:{name}_pooled/{split}"]
        words += ["--source", source, "--candidates", str(CANDIDATES), "--split", split, "--model", self.model]
        return Step(f"prefer-{source}-{name}-{split}", [*words, "--out", self.path(f"pref-{source}-{name}-{split}")])

    def fit(self, source: str, recipe: str) -> Step:
        """Align the base reranker with a source by a recipe."""
        runs = [word for name in LEARNED for word in ("--pref", self.path(f"pref-{source}-{name}-train"))]
        mix = self.relevance_data() if "--relevance-mix" in RECIPES[recipe] else []
        words = ["fit", "reranker", *runs, "--base", self.path("relevance"), *RECIPES[recipe], *mix]
        name = f"{source}-{recipe}"
        return Step(f"fit-{recipe}-{source}", [*words, "--out", self.path(name)], self.work / name)

    def compare(self) -> Step:
        """Compare the base, the chosen rerankers and those of the paper's recipe on test questions."""
        words = ["eval-rerank"]
        for source in SOURCES:
            words += [word for name in TESTED for word in ("--pref", self.path(f"pref-{source}-{name}-test"))]
        for source in SOURCES:
            words += ["--rerank", f"{source}={self.path(f'{source}-{choose_recipe(self.work, source)}')}"]
            words += ["--rerank", f"{source}-{REFERENCE}={self.path(f'{source}-{REFERENCE}')}"]
        words += ["--base", self.path("relevance"), "--model", self.model, "--top", "1,3"]
        return Step("compare", [*words, "--out", self.path("compared")], stdout_file="rerank.txt")


def choose_recipe(work: Path, source: str) -> str:
    """Return the recipe with the highest P@1 on dev questions, the first of equals."""
    return choose_recipe_of({recipe: read_selection(work / f"{source}-{recipe}") for recipe in RECIPES})


def choose_recipe_of(selections: Mapping[str, Mapping[str, Any]]) -> str:
    """Choose among recipes whose weights were chosen on dev questions; without any, return the first recipe."""
    values = {recipe: selections.get(recipe, {}).get("chosen", -1.0) for recipe in RECIPES if recipe != REFERENCE}
    return max(values, key=lambda recipe: values[recipe])


def read_selection(folder: Path) -> dict[str, Any]:
    """Return how a reranker's weights were chosen; empty if they were not."""
    file = folder / "reranker.json"
    return (json.loads(file.read_text(encoding="utf-8"))["selection"] or {}) if file.is_file() else {}


# --- candidates -----------------------------------------------------------------------------------


def prepare(plan: AlignmentPlan) -> None:
    """Search the candidates of all questions and write them as data sets with passages."""
    from knowgate.cli.main import run
    from knowgate.data.questions import load_questions
    from knowgate.retrieval import load_retriever

    prepare_work_folder(plan.bench, plan.work)
    if not (plan.work / "idx").is_dir():
        run(["index", plan.path("pooled.jsonl.gz"), "--out", plan.path("idx")])
    retriever = load_retriever(plan.path("idx"))
    for split, sizes in (("train", LEARNED), ("test", TESTED)):
        for name, size in sizes.items():
            questions = load_questions(f"bench:{name}_ctx/{split}", min(size, plan.most))
            hits = retriever.search([question.text for question in questions], CANDIDATES)
            write_questions(plan.work / "data" / f"{name}_pooled" / f"{split}.jsonl.gz", questions, hits)
    for name in ENGLISH:
        questions = load_questions(f"bench:{name}_ctx/train", min(RELEVANCE, plan.most))
        hits = retriever.search([question.text for question in questions], SEARCHED)
        passages = [select_relevance(*pair) for pair in zip(questions, hits, strict=True)]
        write_questions(plan.work / "data" / f"{name}_relevance" / "train.jsonl.gz", questions, passages)


def select_relevance(question: Any, hits: Sequence[Any]) -> list[Any]:
    """Return the passages that a relevance example uses: the first with the answer and the first without it."""
    from knowgate.core.text import join_tokens
    from knowgate.data.preferences import deduplicate_passages
    from knowgate.labels.grading import list_gold_answers
    from knowgate.training.reranker import contains_answer

    answers = [text for gold in list_gold_answers(question) if (text := join_tokens(gold)).strip()]
    pool = deduplicate_passages([*question.contexts, *hits])
    relevant = [contains_answer(passage, answers) for passage in pool]
    with_answer = [passage for passage, is_relevant in zip(pool, relevant, strict=True) if is_relevant]
    without = [passage for passage, is_relevant in zip(pool, relevant, strict=True) if not is_relevant]
    return [*with_answer[:POSITIVES], *without[:NEGATIVES]]


def write_questions(file: Path, questions: Sequence[Any], passages: Sequence[Sequence[Any]]) -> None:
    """Write questions with their passages in the format of the benchmark folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        for question, contexts in zip(questions, passages, strict=True):
            texts = [{"id": passage.id, "title": passage.title, "text": passage.text} for passage in contexts]
            record = {"id": question.id, "question": question.text, "answers": list(question.answers), "lang": "en"}
            lines.write(json.dumps({**record, "contexts": texts}, ensure_ascii=False) + "\n")


# --- larger base ----------------------------------------------------------------------------------


def write_larger_base_rows(plan: AlignmentPlan, tokenizer_folder: str, out: Path) -> None:
    """Write one prompt for each question and candidate, with the targets of the second protocol."""
    from transformers import AutoTokenizer

    from benchmarks.policy_rows import Sequences
    from knowgate.data.questions import load_questions
    from knowgate.data.splits import fingerprint_text, mark_held_out
    from knowgate.training.reranker import DEV_SHARE

    os.environ["KNOWGATE_BENCH"] = plan.path("data")
    tokenizer, effects = AutoTokenizer.from_pretrained(tokenizer_folder), read_effects(EFFECTS)
    rows, names = Sequences([], [], [], []), []
    for split, sizes in (("train", LEARNED), ("test", TESTED)):
        for name in sizes:
            questions = load_questions(f"bench:{name}_pooled/{split}")
            is_dev = mark_held_out([fingerprint_text(question.text) for question in questions], DEV_SHARE, 0)
            for question, held_out in zip(questions, is_dev, strict=True):
                measured = [effects[f"pref-{source}-{name}-{split}", question.id] for source in SOURCES]
                targets = make_targets(question, *measured)
                for passage in question.contexts or ():
                    if passage.id in targets:
                        text = f"{passage.title}. {passage.text}" if passage.title else passage.text
                        prompt = f"Question: {question.text}\nPassage: {text}\n{LARGER_BASE_ASKS}"
                        rows.ids.append(tokenizer.encode(prompt, add_special_tokens=False))
                        rows.positions.append([len(rows.ids[-1]) - 1])
                        rows.targets.append(targets[passage.id])
                        rows.folds.append(-1 if split == "test" else int(held_out))
                        names.append({"set": name, "id": question.id, "passage": passage.id, "test": split == "test"})
    out.mkdir(parents=True, exist_ok=True)
    rows.save(out / "rerank_rows.npz")
    with gzip.open(out / "rerank_rows.jsonl.gz", "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in names)
    print(f"{len(names)} prompts, {sum(map(len, rows.ids))} tokens")


def read_effects(file: Path) -> dict[tuple[str, str], list[tuple[str, float, bool | None]]]:
    """Return the recorded effects of the candidates, by preference run and question."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return {(record["run"], record["id"]): [tuple(each) for each in record["candidates"]] for record in records}


def make_targets(question: Any, benefit: Sequence[Any], likelihood: Sequence[Any]) -> dict[str, list[float]]:
    """Return relevance, benefit and likelihood of each passage by id, then benefit and likelihood with clear negatives.

    A question without passages of both kinds has no target (NaN) but relevance.
    """
    from knowgate.core.text import join_tokens
    from knowgate.data.preferences import select_passages
    from knowgate.labels.grading import list_gold_answers
    from knowgate.training.reranker import contains_answer

    answers = [text for gold in list_gold_answers(question) if (text := join_tokens(gold)).strip()]
    shifts = {each[0]: each[1] for each in likelihood}
    targets = {each.id: [float(contains_answer(each, answers))] for each in question.contexts}
    is_clear = {key: shift <= max(shifts.values()) - MARGIN for key, shift in shifts.items()}
    columns: list[dict[str, float]] = []
    for effects in (benefit, likelihood):
        selected = select_passages([each[1] for each in effects], [each[2] for each in effects])
        positives, negatives = (
            [effects[index][0] for index in part] for part in (selected.positives, selected.negatives)
        )
        columns.append(dict.fromkeys(positives, 1.0) | dict.fromkeys(negatives, 0.0) if positives and negatives else {})
    clear = [{key: value for key, value in column.items() if value or is_clear.get(key)} for column in columns]
    for column in (*columns, *clear):
        for key, values in targets.items():
            values.append(column.get(key, float("nan")))
    measured = {each[0] for each in benefit}
    return {key: values for key, values in targets.items() if key in measured}


# --- results --------------------------------------------------------------------------------------


def copy_results(plan: Plan, out: Path) -> None:
    """Copy tables, predictions and manifests, and the effect of each passage by id."""
    for name in ("rerank.md", "rerank.json", "predictions.jsonl"):
        if (file := plan.work / "compared" / name).is_file():
            shutil.copyfile(file, out / name)
    for name in ("reranker.json", "relevance.json", "pref.json"):
        for file in sorted(plan.work.glob(f"*/{name}")):
            shutil.copyfile(file, out / f"{file.parent.name}.{name}")
    with gzip.GzipFile(out / "effects.jsonl.gz", "wb", mtime=0) as lines:
        for folder in sorted(plan.work.glob("pref-*")):
            lines.writelines((json.dumps(record) + "\n").encode() for record in list_effects(folder))


def list_effects(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the effect of each passage of a preference folder, without texts."""
    from knowgate.data.preferences import PreferenceFolder

    for row in PreferenceFolder(folder).rows():
        candidates = [(passage.id, round(passage.shift, 3), passage.correct) for passage in row.candidates]
        base = None if row.base is None else round(row.base, 3)
        yield {"run": folder.name, "id": row.id, "base": base, "candidates": candidates, "error": bool(row.error)}


def main() -> None:
    """Run the steps, or prepare their data."""
    parser = create_parser(__doc__)
    parser.add_argument("--base", default="minilm", help="cross-encoder that is trained on relevance")
    parser.add_argument("--most", type=int, default=100_000, help="maximum number of questions of any data set")
    parser.add_argument("--prepare", action="store_true", help="search the candidates and write WORK/data")
    parser.add_argument("--larger-base", type=Path, metavar="ROWS", help="write the rows of the larger base")
    parser.add_argument("--tokenizer", help="tokenizer folder of the larger base")
    options = vars(parser.parse_args())
    only, print_only, prepare_only = (options.pop(name) for name in ("only", "print", "prepare"))
    rows, tokenizer = options.pop("larger_base"), options.pop("tokenizer")
    plan = AlignmentPlan(**options)
    if prepare_only:
        return prepare(plan)
    if rows:
        return write_larger_base_rows(plan, tokenizer, rows)
    os.environ["KNOWGATE_BENCH"] = plan.path("data")
    reranker_cache.ANSWER_BATCH = 1_024  # keeps a GPU busy
    out = plan.work / "out"
    out.mkdir(parents=True, exist_ok=True)
    seconds = run_steps(plan.steps(), out, only, print_only=print_only)
    if not print_only and (only is None or {"compare", "keep"} & set(only)):
        copy_results(plan, out)
    print(f"{seconds:.0f} s in total; results: {out}")
    return None


if __name__ == "__main__":
    main()
