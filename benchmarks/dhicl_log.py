"""DH-ICL with a growing log: balanced examples, a cut learned from the log, and the gain of more log entries.

    python -m benchmarks.dhicl_log prepare --rows FOLDER --trained FOLDER --tokenizer FOLDER --inputs FOLDER
    python -m benchmarks.dhicl_log run --inputs FOLDER --model hf:FOLDER --out FOLDER
    python -m benchmarks.dhicl_log record --inputs FOLDER --out FOLDER

`prepare` needs the benchmark data and the closed-book answers (`policy_rows`, `paper_training`). `run` needs the LLM and
the inputs only. It takes less than four minutes on one H200. A second call continues. `record` writes the predictions
to `runs/papers/dhicl_log.jsonl.gz`, without question texts; `tables/dhicl_log.py` renders them.

Protocol, written before the run:

- *Log.* TriviaQA train questions with the label known if the greedy closed-book answer of Qwen2.5-Coder-1.5B is right.
  The paper asks for ten right samples of ten, but this LLM then knows .5 % of the train questions: a log without known
  examples. No log question equals a question of the whole test split (compared without case, punctuation and articles).
  The order is random (seed 0): first the 2,000 questions of the train run, whose answers with passages are recorded, too,
  then the others of the same data set, then closed-book TriviaQA. A log of n entries is the first n. Time-sensitive
  questions are left out, because no test set here has any.
- *Test.* The 750 recorded TriviaQA test questions, and KB-SAT: as many known as unknown questions, drawn (seed 0) from
  the first 1,500 test questions. Test questions take part in no choice.
- *Leave-one-out.* Logged questions are decided with the log without themselves: the first 1,000 of a log of 5,000 to choose
  a variant, and 1,000 more for the rules that are compared; the first 500 of logs of other sizes. Everything is learned
  from their needs and labels.
- *Rules at 5,000 entries.* Paper: k = 20, nearest examples, the paper's sign, cut .5. Balanced examples: the same, with as
  many known as unknown examples. Each also at the learned cut, which has the best balanced accuracy (known or not) on
  logged questions. Tuned: the k (10, 20, 30), examples (nearest, balanced) and sign (paper, code, none) with the highest
  AUROC on logged questions, at the learned cut. Calibrated: a logistic regression of "known" on the log-odds of the
  paper's and of the tuned variant without and with the paper's sign, and on the similarity-weighted share of known
  questions among the nearest; out-of-fold predictions (five folds) choose its cut.
- *Operating point on TriviaQA.* Each score also gets the cut that skips most logged questions at a loss of at most .5
  points against always retrieving, by the recorded answers of the train run. .5 leaves a margin for chance.
- *With the draft.* An extension, because the paper's gate reads questions alone: "My answer: ..." with the greedy
  closed-book answer follows each question, also in the examples. k = 20, nearest or balanced examples and sign by AUROC on
  logged questions; alone at the learned cut, and added to the calibrated score.
- *Curve.* 0 entries: the LLM is asked outright. 100, 300, 1,000, 2,000, 5,000 and 12,000 entries: the paper's rule, and the
  tuned variant at the cut learned from that log.
- *Targets.* KB-SAT at least 65 %. TriviaQA within 1 point of always retrieving at 85 % retrieval or less.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper_record import HOME, read_record, write_record
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel
from knowgate.gates.dhicl import DhiclGate, calibrate_logits, get_known_flags
from knowgate.gates.prompt import PromptGate
from knowgate.gates.scoring import bind_gate, read_questions
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.stats.metrics import auroc
from knowgate.types import Neighbor, Question, Reading

RECORD = HOME / "dhicl_log.jsonl.gz"
SIGNS = ("none", "paper", "code")  # columns of the log-odds
COUNTS, PAPER_COUNT = (10, 20, 30), 20
MAIN_SIZE, CURVE_SIZES = 5_000, (1_000, 100, 300, 2_000, 12_000)  # the most important sizes first
LEFT_OUT, CURVE_LEFT_OUT = 1_000, 500  # logged questions decided by leave-one-out; as many more at the main size
DRAFT = "\nMy answer: "  # between a question and the draft
SIMILARITY_SCALE = 8.0  # of the weights exp(scale * similarity) with which the nearest questions vote
DATA_SET, RUNS = "triviaqa_ctx", HOME.parent / "qwen2.5-coder-1.5b"
TEST_QUESTIONS = 1_500  # from which KB-SAT is drawn
SCOPE = HistoryScope("qwen", "default")
LABELS = {False: KnowledgeLabel.UNKNOWN, True: KnowledgeLabel.KNOWN}


@dataclass(frozen=True)
class Inputs:
    """Questions with labels and vectors: the log in its random order, then the test questions.

    Attributes:
        rows: Records with id, question, draft, known, and whether it is a test question and belongs to KB-SAT.
        vectors: Unit vector of each question (minilm).
    """

    rows: Sequence[dict[str, Any]]
    vectors: np.ndarray[Any, Any]

    @classmethod
    def load(cls, folder: Path) -> Inputs:
        """Load what `prepare` wrote; the vectors are computed on the first call."""
        rows, file = read_record(folder / "questions.jsonl.gz"), folder / "vectors.npy"
        if not file.exists():
            np.save(file, embed_questions([row["question"] for row in rows]))
        return cls(rows, np.load(file))

    @cached_property
    def with_drafts(self) -> Inputs:
        """The same inputs with the LLM's closed-book answer after each question."""
        rows = [{**row, "question": row["question"] + DRAFT + row["draft"]} for row in self.rows]
        return Inputs(rows, self.vectors)

    @cached_property
    def log_size(self) -> int:
        """Number of logged questions."""
        return sum(not row["test"] for row in self.rows)

    @cached_property
    def index(self) -> dict[str, int]:
        """Row number by question."""
        return {row["question"]: number for number, row in enumerate(self.rows)}

    @cached_property
    def known(self) -> np.ndarray[Any, Any]:
        """Whether the LLM knows each question."""
        return np.array([row["known"] for row in self.rows], dtype=bool)


@dataclass(frozen=True)
class ArrayLog:
    """The first `size` entries of the log, searched by vectors that were computed before.

    It has the two methods of a `HistoryStore` that the gate calls.
    """

    inputs: Inputs
    size: int

    def count(self, scope: HistoryScope) -> int:
        """Return the number of entries."""
        return self.size

    def search(
        self, questions: Sequence[str], k: int, scope: HistoryScope, exclude: Collection[KnowledgeLabel] = ()
    ) -> list[tuple[Neighbor, ...]]:
        """Find the k most similar entries of each question, without the question itself and excluded labels."""
        inputs, excluded = self.inputs, {label == KnowledgeLabel.KNOWN for label in exclude}
        allowed = np.array([number for number in range(self.size) if bool(inputs.known[number]) not in excluded], int)
        own = np.array([inputs.index[question] for question in questions], int)
        similarity = inputs.vectors[own] @ inputs.vectors[allowed].T
        similarity[own[:, None] == allowed[None, :]] = -np.inf
        count = min(k, len(allowed) - 1)
        nearest = np.argpartition(-similarity, count - 1, axis=1)[:, :count]
        nearest = np.take_along_axis(nearest, np.argsort(-np.take_along_axis(similarity, nearest, 1), axis=1), axis=1)
        return [
            tuple(
                Neighbor(inputs.rows[number]["question"], LABELS[inputs.known[number]], float(value))
                for number, value in zip(allowed[order], values[order], strict=True)
            )
            for order, values in zip(nearest, similarity, strict=True)
        ]


def embed_questions(questions: Sequence[str], batch: int = 256) -> np.ndarray[Any, Any]:
    """Compute the vectors of the embedder minilm, without the package sentence-transformers: means over tokens."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    from knowgate.models.embedded_weights import fetch_weights

    folder, device = fetch_weights("minilm"), "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).to(device).eval()
    order = sorted(range(len(questions)), key=lambda number: len(questions[number]))
    vectors = np.zeros((len(questions), model.config.hidden_size), dtype=np.float32)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        texts = [questions[number] for number in part]
        encoded = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt").to(device)
        with torch.inference_mode():
            states = model(**encoded).last_hidden_state
        mask = encoded["attention_mask"][:, :, None].to(states.dtype)
        means = (states * mask).sum(1) / mask.sum(1)
        vectors[part] = torch.nn.functional.normalize(means, dim=1).float().cpu().numpy()
    return vectors


# --- passes of the LLM ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One pass of the LLM over questions, with examples from a log of `size` entries; 0 asks outright.

    Attributes:
        part: 'log' or 'more' (logged questions, by leave-one-out), or 'test'.
        with_drafts: Whether the closed-book answer follows each question.
    """

    size: int
    k: int
    balanced: bool
    part: str
    with_drafts: bool = False

    @property
    def name(self) -> str:
        """Name of the results."""
        options = ("-balanced" if self.balanced else "") + ("-draft" if self.with_drafts else "")
        return f"{self.size}-k{self.k}{options}-{self.part}"

    def select(self, inputs: Inputs) -> range:
        """Return the numbers of the questions to decide."""
        parts = {
            "log": range(min(LEFT_OUT if self.size == MAIN_SIZE else CURVE_LEFT_OUT, self.size, inputs.log_size)),
            "more": range(min(LEFT_OUT, inputs.log_size), min(2 * LEFT_OUT, inputs.log_size)),
            "test": range(inputs.log_size, len(inputs.rows)),
        }
        return parts[self.part]

    def decide(self, inputs: Inputs, model: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Let the LLM read the questions; return log-odds of "unknown" by sign, and what the examples were."""
        inputs = inputs.with_drafts if self.with_drafts else inputs
        questions = [Question(inputs.rows[number]["question"], lang="en") for number in self.select(inputs)]
        log: Any = ArrayLog(inputs, min(self.size, inputs.log_size))
        gate = bind_gate(
            DhiclGate(log, k=self.k, balanced=self.balanced) if self.size else PromptGate(), model, PROMPTS
        )
        readings = read_questions(model, [gate], questions, PROMPTS)
        if not self.size:
            logits = np.array([reading.labels[gate.name][-1] for reading in readings], dtype=float)
            return {"odds": np.repeat(logits[:, 1:] - logits[:, :1], len(SIGNS), axis=1)}
        return {
            "odds": np.array([_compute_odds(reading, gate.name) for reading in readings]),
            "known": np.array([sum(get_known_flags(reading.neighbors[gate.name])) for reading in readings]),
            "vote": np.array([_count_votes(reading.neighbors[gate.name]) for reading in readings]),
        }


PROMPTS = AnswerPrompts()


def _compute_odds(reading: Reading, gate: str) -> list[float]:
    """Return the log-odds of "unknown" for each sign of the correction."""
    known = get_known_flags(reading.neighbors[gate])
    corrected = [calibrate_logits(reading.labels[gate], known, sign) for sign in SIGNS]  # type: ignore[arg-type]
    return [z_unknown - z_known for z_known, z_unknown in corrected]


def _count_votes(neighbors: Sequence[Neighbor]) -> float:
    """Return the share of known questions among the nearest, weighted by similarity."""
    weights = np.exp([SIMILARITY_SCALE * neighbor.similarity for neighbor in neighbors])
    return float(weights @ [neighbor.label == KnowledgeLabel.KNOWN for neighbor in neighbors] / weights.sum())


def plan_jobs(inputs: Inputs, out: Path) -> Iterator[Job]:
    """Yield the passes, the most important first. The variant of the curve is chosen when its passes are done."""
    variants = [(k, balanced) for k in COUNTS for balanced in (False, True)]
    yield from (Job(MAIN_SIZE, *variant, "log") for variant in variants)
    tuned = choose_variant(inputs, out)[:2]
    compared = dict.fromkeys([(PAPER_COUNT, False), (PAPER_COUNT, True), tuned])
    yield from (Job(MAIN_SIZE, *variant, "test") for variant in compared)
    yield Job(0, 0, False, "test")
    yield from (Job(MAIN_SIZE, *variant, "more") for variant in compared)
    curve = [
        Job(size, *variant, part)
        for size in CURVE_SIZES
        for variant in dict.fromkeys([(PAPER_COUNT, False), tuned])
        for part in ("log", "test")
    ]
    largest = max(CURVE_SIZES)
    yield from (job for job in curve if job.size < largest)
    for part in ("log", "test", "more"):
        yield from (Job(MAIN_SIZE, PAPER_COUNT, balanced, part, with_drafts=True) for balanced in (False, True))
    yield from (job for job in curve if job.size == largest)


def choose_variant(inputs: Inputs, out: Path) -> tuple[int, bool, int]:
    """Return the k, the kind of examples and the sign (as a column) with the highest AUROC on logged questions."""
    scores: dict[tuple[int, bool, int], float] = {}
    for k in COUNTS:
        for balanced in (False, True):
            job = Job(MAIN_SIZE, k, balanced, "log")
            odds, known = np.load(out / f"{job.name}.npz")["odds"], inputs.known[list(job.select(inputs))]
            scores |= {(k, balanced, sign): auroc(~known, odds[:, sign]) or 0.5 for sign in range(len(SIGNS))}
    return max(scores, key=lambda variant: scores[variant])


def run_jobs(inputs: Inputs, model: Any, out: Path, seconds: float) -> None:
    """Run the passes whose results are not there yet. After `seconds`, no new pass starts."""
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    for job in plan_jobs(inputs, out):
        file = out / f"{job.name}.npz"
        if file.exists():
            continue
        start = time.perf_counter()
        if start - started > seconds:
            print(f"stopped before {job.name}; call again to continue")
            return
        results = job.decide(inputs, model)
        duration = time.perf_counter() - start
        partial = file.with_suffix(".partial.npz")
        np.savez_compressed(
            partial, seconds=np.array(duration), **{key: v.astype(np.float32) for key, v in results.items()}
        )
        partial.replace(file)
        print(f"{job.name}: {len(results['odds'])} questions in {duration:.1f} s", flush=True)
    print(f"all passes are done ({time.perf_counter() - started:.0f} s)")


# --- inputs and record ----------------------------------------------------------------------------


def prepare(rows_folder: Path, trained: Path, tokenizer: str, folder: Path) -> None:
    """Write the questions of the log and of the tests with their labels."""
    from knowgate.data.runs.folder import RunFolder

    by_text = _read_labeled(rows_folder, trained, tokenizer)
    texts = {split: _read_texts(split) for split in ("train", "test")}  # by id
    recorded = {
        split: [by_id[row.id] for row in RunFolder(RUNS / f"{DATA_SET}-{split}").rows()]
        for split, by_id in texts.items()
    }
    for row_id, text in (*texts["train"].items(), *texts["test"].items()):
        if text in by_text:
            by_text[text]["id"] = row_id  # a question that occurs in two data sets gets the id of the run
    log = _order_log(by_text, recorded["train"], list(texts["train"].values()))
    tests = [row for row in by_text.values() if row["test"]][:TEST_QUESTIONS]
    kbsat, in_run = _draw_kbsat(tests), {by_text[text]["id"] for text in recorded["test"]}
    tests = [{**row, "kbsat": row["id"] in kbsat} for row in tests if row["id"] in kbsat | in_run]
    if any(by_text.get(text, {"test": True})["test"] is False for text in texts["test"].values()):
        raise SystemExit("a logged question is a test question")
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / "questions.jsonl.gz", [*log, *tests])
    known = np.mean([row["known"] for row in log])
    print(f"log of {len(log)} questions, {known:.3f} known")
    print(f"{len(tests)} test questions, {len(in_run)} of the run, {len(kbsat)} of KB-SAT")


def _read_labeled(rows_folder: Path, trained: Path, tokenizer: str) -> dict[str, dict[str, Any]]:
    """Read the closed-book rows of TriviaQA with their answers and labels, by normalized question."""
    from transformers import AutoTokenizer

    from knowgate.data.splits import fingerprint_text_loosely

    with gzip.open(rows_folder / "closed_book.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    answered = np.load(trained / "white_box.npz")
    sequences = np.split(answered["flat"], np.cumsum(answered["lengths"])[:-1])
    answers = [ids[start + 1 :] for ids, start in zip(sequences, answered["positions"][:, 0], strict=True)]
    drafts = AutoTokenizer.from_pretrained(tokenizer).batch_decode(answers, skip_special_tokens=True)
    columns = (answered["targets"][:, 0], answered["folds"], answered["group"], drafts)
    return {
        fingerprint_text_loosely(row["question"]): {
            "id": row["id"],
            "question": row["question"],
            "draft": " ".join(draft.split()),
            "known": int(right),
            "test": bool(fold < 0),
        }
        for row, right, fold, group, draft in zip(rows, *columns, strict=True)
        if group == 0  # TriviaQA
    }


def _read_texts(split: str) -> dict[str, str]:
    """Read the normalized questions of a split of the data set by id."""
    from knowgate.data.questions import load_questions
    from knowgate.data.splits import fingerprint_text_loosely

    return {
        question.id: fingerprint_text_loosely(question.text) for question in load_questions(f"bench:{DATA_SET}/{split}")
    }


def _order_log(by_text: dict[str, dict[str, Any]], recorded: Sequence[str], own: Sequence[str]) -> list[dict[str, Any]]:
    """Order the train rows: those of the train run, those of the same data set, the others; each part at random."""
    rng = np.random.default_rng(0)
    train = [text for text, row in by_text.items() if not row["test"]]
    in_run, in_set = set(recorded), set(own)
    parts = (
        [text for text in train if text in in_run],
        [text for text in train if text in in_set - in_run],
        [text for text in train if text not in in_set | in_run],
    )
    return [by_text[part[number]] for part in parts for number in rng.permutation(len(part))]


def _draw_kbsat(tests: Sequence[dict[str, Any]]) -> set[str]:
    """Draw KB-SAT as the library does, and return the ids of its questions."""
    from knowgate.data.runs.rows import GradedAnswer, LabelRow
    from knowgate.papers.self_assessment import build_kb_sat

    rows = [
        LabelRow(row["id"], row["question"], "en", closed=GradedAnswer("", correct=bool(row["known"]))) for row in tests
    ]
    return {str(record["id"]) for record in build_kb_sat(rows).balanced}


def record(inputs: Inputs, out: Path) -> None:
    """Write the results of all passes by question id, after a line with facts about the run."""
    results = {file.stem: np.load(file) for file in sorted(out.glob("*.npz")) if ".partial" not in file.name}
    jobs = {
        name: Job(int(size), int(k[1:]), "balanced" in rest, rest[-1], "draft" in rest)
        for name in results
        for size, k, *rest in (name.split("-"),)
    }
    k, balanced, sign = choose_variant(inputs, out)
    tuned = {"k": k, "balanced": balanced, "sign": SIGNS[sign]}
    facts = {"tuned": tuned, "seconds": {name: round(float(part["seconds"]), 2) for name, part in results.items()}}
    records = [{"id": row["id"], "known": row["known"], "test": row["test"], "kbsat": row.get("kbsat", False), "passes": {}}
               for row in inputs.rows]  # fmt: skip
    for name, part in results.items():
        for position, number in enumerate(jobs[name].select(inputs)):
            pass_name = name.rpartition("-")[0]
            values = [*part["odds"][position], *(part[key][position] for key in ("known", "vote") if key in part)]
            records[number]["passes"][pass_name] = [round(float(value), 3) for value in values]
    write_record(RECORD, [facts, *(row for row in records if row["passes"])])


def main() -> None:
    """Prepare the inputs, run the LLM, or write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("prepare", "run", "record"))
    parser.add_argument("--inputs", type=Path, required=True, help="folder that `prepare` writes")
    parser.add_argument("--rows", type=Path, help="output of policy_rows")
    parser.add_argument("--trained", type=Path, help="output of paper_training")
    parser.add_argument("--tokenizer", help="folder of the LLM's tokenizer")
    parser.add_argument("--model", help="the LLM, such as hf:FOLDER")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=200, help="start no new pass after this time")
    options = parser.parse_args()
    if options.step == "prepare":
        prepare(options.rows, options.trained, options.tokenizer, options.inputs)
    elif options.step == "run":
        from knowgate.models import load_model

        run_jobs(Inputs.load(options.inputs), load_model(options.model), options.out, options.seconds)
    else:
        rows = read_record(options.inputs / "questions.jsonl.gz")
        record(Inputs(rows, np.zeros((0, 0))), options.out)


if __name__ == "__main__":
    main()
