"""Record the runs behind RESULTS: label runs of every data set, trained judges, and gates that call the LLM.

    python -m benchmarks.papers --model gguf:FILE --bench FOLDER --work FOLDER [--only NAME ...] [--print]

A GPU is recommended. Full runs (questions, passages, hidden states) are written to WORK/full, printed tables to
WORK/out. The following command converts them to the compact runs that are committed under `benchmarks/runs`:

    python -m benchmarks.record WORK/full runs/LLM --gate WORK/uar --pack WORK/boundary-test --printed WORK/out

With --plug-into FOLDER, the judges of this LLM also decide for another LLM (KBM's Table 4). FOLDER holds full runs of
that LLM: its WORK/full, or runs of `import-answers`. `benchmarks/cbdr.py` computes the tables of CBDR.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.steps import ENGLISH, Plan, Step, create_parser, prepare_work_folder, run_steps


@dataclass(frozen=True)
class DataSet:
    """How a data set is labeled.

    Attributes:
        train: Number of training questions.
        test: Number of test questions.
        corpus: Source of the passages: a corpus of the benchmark folder, 'pooled' (the four English corpora),
            'own' (the passages of the data set), or '' (no passages).
        extra_words: More arguments of `knowgate label`.
    """

    train: int
    test: int
    corpus: str
    extra_words: tuple[str, ...] = ()


SETS = {
    "triviaqa_ctx": DataSet(2_000, 750, "triviaqa"),
    "nq_ctx": DataSet(1_000, 500, "nq"),
    "hotpotqa_ctx": DataSet(1_000, 500, "hotpotqa", ("--iterative",)),
    "squad_ctx": DataSet(1_000, 500, "squad"),
    "webqa_zh_ctx": DataSet(1_000, 500, "zh"),
    "cmrc2018_ctx": DataSet(1_000, 500, "zh"),
    "openbookqa": DataSet(1_000, 500, "pooled"),
    "mmlu": DataSet(1_000, 500, "pooled"),
    "cmmlu": DataSet(325, 500, "zh"),
    "ceval": DataSet(255, 500, "zh"),
    "strategyqa_ctx": DataSet(1_000, 229, "own"),
    "temporalqa_ctx": DataSet(0, 175, "own"),
    "freshqa": DataSet(100, 500, ""),
}
JUDGE_SETS = ("triviaqa_ctx", "nq_ctx", "hotpotqa_ctx", "squad_ctx", "webqa_zh_ctx", "openbookqa")
JUDGES = {"kbm": ("kbm",), "kbm-certainty": ("kbm", "--head", "certainty"), "ik": ("ik", "--tokens", "32")}
DHICL_SETS = ("triviaqa_ctx", "nq_ctx", "temporalqa_ctx", "freshqa")  # Its log holds questions of TriviaQA.
TRAIN_SAMPLES = 10  # Thirty samples per training question would dominate the run time.
ANSWER_WORDS = "true/false,false/true,yes/no,1/2,bar/foo"
DHICL_SAMPLING = ("--samples", "10", "--temperature", "0.6", "--top-p", "0.9", "--top-k", "50")  # as in the paper


@dataclass(frozen=True)
class PapersPlan(Plan):
    """The steps of all papers except CBDR.

    Attributes:
        samples: Closed-book samples per test question.
        most: Maximum number of questions of any run, to try the plan out.
        plug_into: Folders with full runs of other LLMs for which the judges decide too.
    """

    samples: int
    most: int
    plug_into: Sequence[Path] = ()

    def limit(self, questions: int) -> str:
        """Return a number of questions, capped at `most`, as an argument."""
        return str(min(questions, self.most))

    def full(self, name: str) -> str:
        """Return the folder of a full label run."""
        return self.path("full", name)

    def steps(self) -> Iterator[Step]:
        """Yield the steps in the order in which they run."""
        yield from self.indexes()
        for name in SETS:
            yield from self.labels(name)
        yield from self.boundary()
        yield from self.judges()
        yield from self.plug_in()
        yield from self.ablations()
        yield from self.logs()
        yield from self.self_assessment()

    def indexes(self) -> Iterator[Step]:
        """Yield the BM25 index of every corpus and of the pooled one."""
        for corpus in (*ENGLISH, "zh"):
            file = str(self.bench / f"corpus_{corpus}.jsonl.gz")
            yield Step(
                f"index-{corpus}", ["index", file, "--out", self.path(f"idx-{corpus}")], self.work / f"idx-{corpus}"
            )
        words = ["index", self.path("pooled.jsonl.gz"), "--out", self.path("idx-pooled")]
        yield Step("index-pooled", words, self.work / "idx-pooled")

    def labels(self, name: str) -> Iterator[Step]:
        """Yield the label runs of a data set: answers with and without passages, and the signals of gates."""
        data = SETS[name]
        for split, limit in (("train", data.train), ("test", data.test)):
            if limit:
                words = ["label", "--data", f"bench:{name}/{split}", "--limit", self.limit(limit), *self.passages(data)]
                samples = self.samples if split == "test" else min(self.samples, TRAIN_SAMPLES)
                words += ["--model", self.model, "--samples", str(samples), "--open-samples", "0", "--seakr"]
                words += ["--layers", "mid,late,last", *data.extra_words, "--out", self.full(f"{name}-{split}")]
                yield Step(f"label-{name}-{split}", words)

    def passages(self, data: DataSet) -> list[str]:
        """Return the arguments that say where the passages come from."""
        if not data.corpus:
            return ["--closed-book"]
        return [] if data.corpus == "own" else ["--index", self.path(f"idx-{data.corpus}"), "--k", "3"]

    def boundary(self) -> Iterator[Step]:
        """Yield KBM's Figures 1 to 3 and 8: 30 samples each without, with, and with masked passages."""
        for split, limit in (("train", 600), ("test", 300)):
            words = [
                "label",
                "--data",
                f"bench:nq_ctx/{split}",
                "--limit",
                self.limit(limit),
                "--index",
                self.path("idx-nq"),
            ]
            words += ["--k", "3", "--model", self.model, "--samples", "30", "--mask", "--mask-samples", "30"]
            words += ["--layers", "none", "--out", self.path(f"boundary-{split}")]
            yield Step(f"boundary-label-{split}", words)
        words = ["report", self.path("boundary-test"), "--out", self.path("out", "boundary.html")]
        yield Step("boundary-report", words, self.work / "out" / "boundary.html", "boundary.txt")

    def judges(self) -> Iterator[Step]:
        """Yield KBM and IK, trained on six data sets together, and KBM's second look after retrieval."""
        runs = [word for name in JUDGE_SETS for word in ("--labels", self.full(f"{name}-train"))]
        for judge, (kind, *options) in JUDGES.items():
            words = ["fit", kind, *runs, "--epochs", "1", *options, "--out", self.path(judge)]
            yield Step(f"judge-fit-{judge}", words, self.work / judge)
        judges = ",".join(self.path(judge) for judge in JUDGES)
        for name in SETS:
            words = [
                "eval",
                "--labels",
                self.full(f"{name}-test"),
                "--model",
                self.model,
                "--gates",
                judges,
                "--record",
            ]
            yield Step(f"judge-eval-{name}", [*words, "--drop-seen", "--resamples", "0"])
        words = ["fit", "kbm", "--labels", self.path("boundary-train"), "--epochs", "2", "--out", self.path("kbm-seen")]
        yield Step("second-fit", words, self.work / "kbm-seen")
        words = [
            "eval",
            "--labels",
            self.path("boundary-test"),
            "--model",
            self.model,
            "--gates",
            self.path("kbm-seen"),
        ]
        words += [
            "--second-look",
            self.path("kbm-seen"),
            "--record",
            "--no-html",
            "--out",
            self.path("out", "second-look"),
        ]
        yield Step("second-look", words, self.work / "out" / "second-look", "second-look.txt")

    def plug_in(self) -> Iterator[Step]:
        """Yield evaluations in which KBM's judges decide for another LLM, whose answers are recorded."""
        judges = ",".join(self.path(judge) for judge in JUDGES if judge.startswith("kbm"))
        for folder in self.plug_into:
            for run in sorted(folder.glob("*-test")):
                words = ["eval", "--labels", str(run), "--gates", judges, "--plug-in", "--drop-seen", "--record"]
                yield Step(f"plug-in-{run.name}", [*words, "--resamples", "0"])

    def ablations(self) -> Iterator[Step]:
        """Yield IK by number of draft tokens and of training rows, on free-form answers."""
        words = [
            "label",
            "--data",
            "bench:triviaqa_ctx/train",
            "--limit",
            self.limit(3_000),
            "--model",
            self.model,
            "--prompts",
        ]
        words += ["free", "--max-tokens", "128", "--samples", "0", "--closed-book", "--layers", "none"]
        yield Step("ik-label", [*words, "--out", self.path("ik-free")])
        words = ["sweep", "ik", "--labels", self.path("ik-free"), "--tokens", "0,8,32,128", "--rows", "500,all"]
        words += ["--epochs", "1", "--out", self.path("ik-sweep"), "--markdown"]
        yield Step("ik-sweep", words, stdout_file="ik.md")
        words = ["sweep", "ik", "--labels", self.path("ik-free"), "--tokens", "32", "--grades", "contains,judge"]
        words += ["--judge", self.model, "--epochs", "1", "--out", self.path("ik-judged"), "--markdown"]
        yield Step("ik-judged", words, stdout_file="ik-judged.md")

    def logs(self) -> Iterator[Step]:
        """Yield DH-ICL: a log of questions with ten samples each, and its tables."""
        words = [
            "label",
            "--data",
            "bench:triviaqa_ctx/train",
            "--limit",
            self.limit(4_460),
            "--model",
            self.model,
            "--closed-book",
        ]
        yield Step("log-label", [*words, *DHICL_SAMPLING, "--layers", "none", "--out", self.path("log-train")])
        words = ["history", "import", self.path("log-train"), "--rule", "all", "--history", self.path("log.db")]
        words += ["--time-sensitive", "bench:uar_gate_time/train"]
        yield Step("log-import", words, self.work / "log.db")
        criteria = ",".join(f"{name}=bench:uar_gate_{name}/train" for name in ("intent", "knowledge", "time"))
        words = ["fit", "uar", "--labels", self.full("triviaqa_ctx-train"), "--criteria", criteria]
        yield Step("log-fit-uar", [*words, "--model", self.model, "--out", self.path("uar")], self.work / "uar")
        runs = [word for name in DHICL_SETS for word in ("--labels", self.full(f"{name}-test"))]
        words = ["sweep", "dhicl", *runs, "--history", self.path("log.db"), "--model", self.model, "--markdown"]
        words += ["--gates", f"{self.path('uar')},skr:{self.path('log.db')},flare,logprob:min"]
        yield Step("log-sweep", words, stdout_file="dhicl.md")
        words = ["sweep", "latency", "--data", "bench:triviaqa_ctx/test", "--model", self.model, "--markdown"]
        words += [
            "--gates",
            f"dhicl:{self.path('log.db')},{self.path('uar')},skr:{self.path('log.db')},flare,logprob:min",
        ]
        yield Step("log-latency", words, stdout_file="latency.md")

    def self_assessment(self) -> Iterator[Step]:
        """Yield KB-SAT: a set balanced in known and unknown questions, drawn from 1,500; UAR for comparison."""
        words = ["label", "--data", "bench:triviaqa_ctx/test", "--limit", self.limit(1_500), "--model", self.model]
        words += [*DHICL_SAMPLING, "--closed-book", "--layers", "none", "--kb-sat", self.path("kbsat.jsonl")]
        yield Step("sat-label", [*words, "--out", self.path("kbsat")])
        for kind in ("", ".swapped", ".rare"):
            words = ["eval-self", "--data", f"jsonl:{self.path(f'kbsat{kind}.jsonl')}", "--model", self.model]
            words += [
                "--words",
                ANSWER_WORDS,
                "--judge",
                "self",
                "--history",
                self.path("log.db"),
                "--gates",
                self.path("uar"),
            ]
            yield Step(f"sat-eval{kind}", [*words, "--json"], stdout_file=f"kbsat{kind}.jsonl")


def main() -> None:
    """Run the plan, or print its commands."""
    parser = create_parser(__doc__)
    parser.add_argument("--samples", type=int, default=30, help="closed-book samples per test question")
    parser.add_argument("--plug-into", type=Path, nargs="*", default=[], help="full runs of other LLMs to decide for")
    parser.add_argument("--most", type=int, default=100_000, help="maximum number of questions of any run")
    options = vars(parser.parse_args())
    only, print_only = options.pop("only"), options.pop("print")
    plan = PapersPlan(**options)
    out = plan.work / "out" if print_only else prepare_work_folder(plan.bench, plan.work)
    seconds = run_steps(plan.steps(), out, only, print_only=print_only)
    if not print_only:
        print(f"{seconds:.0f} s in total; tables: {out}")


if __name__ == "__main__":
    main()
