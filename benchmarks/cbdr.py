"""Reproduce CBDR: its Tables 1 to 3 and the alignment behind them. Every step is a `knowgate` command.

    python -m benchmarks.cbdr --model hf:FOLDER --bench FOLDER --work FOLDER [--only NAME ...] [--print]

All steps run in one process, so that the weights of a model are loaded once; --print shows the commands as you would
type them. Finished steps are skipped, and interrupted ones resume. Results (tables, predictions, manifests and the
seconds of each step; no questions, no passages) are written to WORK/out.

The paper uses Llama-3-8B, bge-reranker-v2-m3 and 7,622 training questions of NQ. Here, the base reranker is a MiniLM
that is trained on relevance first, and the candidates come from the pooled corpora of the benchmark folder. The test
questions are those of NQ and of HotpotQA, on which the reranker was not aligned.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.steps import ENGLISH, Plan, Step, create_parser, prepare_work_folder, run_steps

SOURCES = ("confidence", "likelihood", "benefit")
TRAIN_SETS, TEST_SETS = ("nq", "triviaqa"), ("nq", "hotpotqa")
TOP_K = (1, 3)  # numbers of passages that the LLM reads


@dataclass(frozen=True)
class CbdrPlan(Plan):
    """The steps of the CBDR reproduction.

    Attributes:
        base: Cross-encoder that is trained on relevance.
        train: Training questions with measured preferences.
        labelled: Training questions of each data set that the LLM answers.
        test: Test questions of each data set.
        relevance: Questions of each data set for the training on relevance.
        candidates: Passages per question.
        cut: Tokens per passage in the control with passages of equal length.
    """

    base: str
    train: int
    labelled: int
    test: int
    relevance: int
    candidates: int
    cut: int

    def steps(self) -> Iterator[Step]:
        """Yield the steps in the order in which they run."""
        yield Step("index", ["index", self.path("pooled.jsonl.gz"), "--out", self.path("idx")], self.work / "idx")
        yield from self.labels()
        yield from self.fits()
        yield from self.preferences()
        yield from self.alignments()
        yield self.tables_1_and_2()
        yield from self.table_3()

    def labels(self) -> Iterator[Step]:
        """Yield the label runs: they train the probe and supply the questions for preferences."""
        for part, names, limit in (("train", TRAIN_SETS, self.labelled), ("test", TEST_SETS, self.test)):
            for name in names:
                words = ["label", "--data", f"bench:{name}_ctx/{part}", "--limit", str(limit), "--model", self.model]
                words += ["--samples", "0", "--closed-book", "--layers", "mid", "--out", self.path(f"{name}-{part}")]
                yield Step(f"label-{name}-{part}", words)

    def fits(self) -> Iterator[Step]:
        """Yield the fits of the probe (on balanced classes) and of the base reranker (on relevance)."""
        from knowgate.training.probe import fit_probe

        runs = [word for name in TRAIN_SETS for word in ("--labels", self.path(f"{name}-train"))]
        balanced = ["--balanced"] if "balanced" in inspect.signature(fit_probe).parameters else []
        words = ["fit", "probe", *runs, "--target", "known", "--layer", "mid", *balanced, "--out", self.path("probe")]
        yield Step("fit-probe", words, self.work / "probe")
        data = [word for name in ENGLISH for word in ("--relevance", f"bench:{name}_ctx/train")]
        words = ["fit", "reranker", *data, "--relevance-index", self.path("idx"), "--limit", str(self.relevance)]
        words += ["--base", self.base, "--out", self.path("relevance")]
        yield Step("fit-relevance", words, self.work / "relevance")

    def preferences(self) -> Iterator[Step]:
        """Yield the preference runs of every source, and of the control with passages of equal length."""
        for source in SOURCES:
            yield from self.preferences_of(source, source, [])
        yield from self.preferences_of("cut", "confidence", ["--cut", str(self.cut)])

    def preferences_of(self, name: str, source: str, options: list[str]) -> Iterator[Step]:
        """Yield the preference runs of one source: training questions, then each test set."""
        runs = [word for data in TRAIN_SETS for word in ("--labels", self.path(f"{data}-train"))]
        yield self.preference_run(f"{name}-train", [*runs, "--limit", str(self.train)], source, "train", options)
        for data in TEST_SETS:
            yield self.preference_run(
                f"{name}-{data}", ["--labels", self.path(f"{data}-test")], source, "test", options
            )

    def preference_run(self, name: str, runs: list[str], source: str, split: str, options: list[str]) -> Step:
        words = ["prefer", *runs, "--source", source, "--index", self.path("idx"), "--candidates", str(self.candidates)]
        words += ["--gate", self.path("probe")] if source == "confidence" else []
        words += ["--split", split, "--model", self.model, *options, "--out", self.path(f"pref-{name}")]
        return Step(f"prefer-{name}", words)

    def alignments(self) -> Iterator[Step]:
        """Yield the alignment of a reranker with every source, and with the controls."""
        for name in (*SOURCES, "cut"):
            yield self.alignment(f"aligned-{name}", name, [])
        yield self.alignment("unread", "confidence", ["--question-unread"])

    def alignment(self, out: str, source: str, options: list[str]) -> Step:
        words = ["fit", "reranker", "--pref", self.path(f"pref-{source}-train"), "--base", self.path("relevance")]
        return Step(f"fit-{out}", [*words, *options, "--out", self.path(out)], self.work / out)

    def tables_1_and_2(self) -> Step:
        """Return the step that compares all rerankers on all preferences."""
        folders = [f"pref-{name}-{part}" for name in (*SOURCES, "cut") for part in ("train", *TEST_SETS)]
        words = ["eval-rerank", *(word for name in folders for word in ("--pref", self.path(name)))]
        rerankers = [*(f"aligned-{name}" for name in (*SOURCES, "cut")), "unread"]
        words += [word for name in rerankers for word in ("--rerank", self.path(name))]
        words += ["--base", self.path("relevance"), "--model", self.model, "--top", ",".join(map(str, TOP_K))]
        return Step("tables-1-2", [*words, "--controls", "--out", self.path("compared")], stdout_file="rerank.txt")

    def table_3(self) -> Iterator[Step]:
        """Yield label runs of NQ with the passages of each reranker, then the sweep of beta over these runs."""
        runs = []
        for reranker in ("bm25", "relevance", *(f"aligned-{source}" for source in SOURCES)):
            for k in TOP_K:
                run = self.path(f"nq-{reranker}-{k}")
                rerank = (
                    ["--rerank", self.path(reranker), "--candidates", str(self.candidates)]
                    if reranker != "bm25"
                    else []
                )
                words = ["label", "--data", "bench:nq_ctx/test", "--limit", str(self.test), "--model", self.model]
                words += ["--index", self.path("idx"), *rerank, "--k", str(k), "--samples", "0", "--layers", "mid"]
                yield Step(f"label-nq-{reranker}-{k}", [*words, "--out", run])
                runs += ["--labels", run]
        yield Step(
            "table-3", ["sweep", "beta", *runs, "--gates", self.path("probe"), "--markdown"], stdout_file="beta.md"
        )


def copy_results(plan: Plan, out: Path) -> None:
    """Copy tables, predictions and manifests, which contain no questions and no passages, to `out`."""
    for name in ("rerank.md", "rerank.json", "predictions.jsonl"):
        if (file := plan.work / "compared" / name).is_file():
            shutil.copyfile(file, out / name)
    for name in ("reranker.json", "relevance.json", "pref.json", "gate.json", "run.json"):
        for file in sorted(plan.work.glob(f"*/{name}")):
            shutil.copyfile(file, out / f"{file.parent.name}.{name}")


def main() -> None:
    """Run the plan, or print its commands."""
    parser = create_parser(__doc__)
    parser.add_argument("--base", default="minilm", help="cross-encoder that is trained on relevance")
    parser.add_argument("--train", type=int, default=3_200, help="training questions with measured preferences")
    parser.add_argument(
        "--labelled", type=int, default=5_000, help="training questions of each data set that the LLM answers"
    )
    parser.add_argument("--test", type=int, default=500, help="test questions of each data set")
    parser.add_argument(
        "--relevance", type=int, default=1_800, help="questions of each data set for relevance training"
    )
    parser.add_argument("--candidates", type=int, default=10, help="passages per question")
    parser.add_argument("--cut", type=int, default=64, help="tokens per passage in the control with equal lengths")
    options = vars(parser.parse_args())
    only, print_only = options.pop("only"), options.pop("print")
    plan = CbdrPlan(**options)
    out = plan.work / "out" if print_only else prepare_work_folder(plan.bench, plan.work)
    seconds = run_steps(plan.steps(), out, only, print_only=print_only)
    if not print_only:
        copy_results(plan, out)
        print(f"{seconds:.0f} s in total; results: {out}")


if __name__ == "__main__":
    main()
