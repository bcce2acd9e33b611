"""The recorded runs behind RESULTS: label runs of every data set, the judges trained on them, the gates that ask.

    python -m benchmarks.papers --model gguf:FILE --bench FOLDER --work FOLDER [--only NAME ...] [--print]

A GPU is advised. Full runs (questions, passages, hidden states) come to WORK/full, printed tables to WORK/out. What is
committed under `benchmarks/runs` is made of them by (runs/LLM: a folder there)

    python -m benchmarks.record WORK/full runs/LLM --gate WORK/uar --pack WORK/boundary-test --printed WORK/out

--plug-into FOLDER: full runs of another LLM (its WORK/full, or runs of `import-answers`) about which the judges of this
one decide too (KBM's Table 4). CBDR's own tables are made by `benchmarks/cbdr.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.steps import ENGLISH, Step, arguments, begin, walk


@dataclass(frozen=True)
class DataSet:
    """Questions taken of each split, and where passages come from.

    corpus: of the benchmark folder, 'pooled' for the four English ones; own: the data's own passages; '': none.
    """

    train: int
    test: int
    corpus: str
    more: tuple[str, ...] = ()


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
JUDGED = ("triviaqa_ctx", "nq_ctx", "hotpotqa_ctx", "squad_ctx", "webqa_zh_ctx", "openbookqa")
JUDGES = {"kbm": ("kbm",), "kbm-certainty": ("kbm", "--head", "certainty"), "ik": ("ik", "--tokens", "32")}
LOGGED = ("triviaqa_ctx", "nq_ctx", "temporalqa_ctx", "freshqa")  # what DH-ICL is measured on, with a log of TriviaQA
TAUGHT = 10  # samples of a training question; thirty would take most of the time
WORDS = "true/false,false/true,yes/no,1/2,bar/foo"
DRAWN = ("--samples", "10", "--temperature", "0.6", "--top-p", "0.9", "--top-k", "50")  # DH-ICL's own sampling


@dataclass(frozen=True)
class Plan:
    """All steps, in their order."""

    model: str
    bench: Path
    work: Path
    samples: int
    most: int
    plug_into: Sequence[Path] = ()

    def at(self, *parts: str) -> str:
        return str(self.work.joinpath(*parts))

    def few(self, limit: int) -> str:
        return str(min(limit, self.most))

    def full(self, name: str) -> str:
        return self.at("full", name)

    def steps(self) -> Iterator[Step]:
        yield from self.indexes()
        for name in SETS:
            yield from self.labels(name)
        yield from self.boundary()
        yield from self.judges()
        yield from self.plugged()
        yield from self.ablations()
        yield from self.logs()
        yield from self.self_assessment()

    def indexes(self) -> Iterator[Step]:
        for corpus in (*ENGLISH, "zh"):
            file = str(self.bench / f"corpus_{corpus}.jsonl.gz")
            yield Step(
                f"index-{corpus}", ["index", file, "--out", self.at(f"idx-{corpus}")], self.work / f"idx-{corpus}"
            )
        words = ["index", self.at("pooled.jsonl.gz"), "--out", self.at("idx-pooled")]
        yield Step("index-pooled", words, self.work / "idx-pooled")

    def labels(self, name: str) -> Iterator[Step]:
        """What the LLM answers with and without passages, and all that gates read."""
        data = SETS[name]
        for split, limit in (("train", data.train), ("test", data.test)):
            if limit:
                words = ["label", "--data", f"bench:{name}/{split}", "--limit", self.few(limit), *self.passages(data)]
                drawn = self.samples if split == "test" else min(self.samples, TAUGHT)
                words += ["--model", self.model, "--samples", str(drawn), "--open-samples", "0", "--seakr"]
                words += ["--layers", "mid,late,last", *data.more, "--out", self.full(f"{name}-{split}")]
                yield Step(f"label-{name}-{split}", words)

    def passages(self, data: DataSet) -> list[str]:
        if not data.corpus:
            return ["--closed-book"]
        return [] if data.corpus == "own" else ["--index", self.at(f"idx-{data.corpus}"), "--k", "3"]

    def boundary(self) -> Iterator[Step]:
        """KBM's Figures 1 to 3 and 8: as many samples with passages and with MASK passages as without."""
        for split, limit in (("train", 600), ("test", 300)):
            words = [
                "label",
                "--data",
                f"bench:nq_ctx/{split}",
                "--limit",
                self.few(limit),
                "--index",
                self.at("idx-nq"),
            ]
            words += ["--k", "3", "--model", self.model, "--samples", "30", "--mask", "--mask-samples", "30"]
            words += ["--layers", "none", "--out", self.at(f"boundary-{split}")]
            yield Step(f"boundary-label-{split}", words)
        words = ["report", self.at("boundary-test"), "--out", self.at("out", "boundary.html")]
        yield Step("boundary-report", words, self.work / "out" / "boundary.html", "boundary.txt")

    def judges(self) -> Iterator[Step]:
        """KBM and IK, trained on six data sets together; KBM's second look, where it has seen passages."""
        runs = [word for name in JUDGED for word in ("--labels", self.full(f"{name}-train"))]
        for called, (kind, *more) in JUDGES.items():
            words = ["fit", kind, *runs, "--epochs", "1", *more, "--out", self.at(called)]
            yield Step(f"judge-fit-{called}", words, self.work / called)
        judges = ",".join(self.at(called) for called in JUDGES)
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
        words = ["fit", "kbm", "--labels", self.at("boundary-train"), "--epochs", "2", "--out", self.at("kbm-seen")]
        yield Step("second-fit", words, self.work / "kbm-seen")
        words = ["eval", "--labels", self.at("boundary-test"), "--model", self.model, "--gates", self.at("kbm-seen")]
        words += ["--second-look", self.at("kbm-seen"), "--record", "--no-html", "--out", self.at("out", "second-look")]
        yield Step("second-look", words, self.work / "out" / "second-look", "second-look.txt")

    def plugged(self) -> Iterator[Step]:
        """KBM's judges decide for another LLM, whose answers are on record."""
        judges = ",".join(self.at(called) for called in JUDGES if called.startswith("kbm"))
        for folder in self.plug_into:
            for run in sorted(folder.glob("*-test")):
                words = ["eval", "--labels", str(run), "--gates", judges, "--plug-in", "--drop-seen", "--record"]
                yield Step(f"plug-in-{run.name}", [*words, "--resamples", "0"])

    def ablations(self) -> Iterator[Step]:
        """IK by draft tokens and by training size, on answers in free form."""
        words = [
            "label",
            "--data",
            "bench:triviaqa_ctx/train",
            "--limit",
            self.few(3_000),
            "--model",
            self.model,
            "--prompts",
        ]
        words += ["free", "--max-tokens", "128", "--samples", "0", "--closed-book", "--layers", "none"]
        yield Step("ik-label", [*words, "--out", self.at("ik-free")])
        words = ["sweep", "ik", "--labels", self.at("ik-free"), "--tokens", "0,8,32,128", "--rows", "500,all"]
        words += ["--epochs", "1", "--out", self.at("ik-sweep"), "--markdown"]
        yield Step("ik-sweep", words, shown="ik.md")
        words = ["sweep", "ik", "--labels", self.at("ik-free"), "--tokens", "32", "--grades", "contains,judge"]
        words += ["--judge", self.model, "--epochs", "1", "--out", self.at("ik-judged"), "--markdown"]
        yield Step("ik-judged", words, shown="ik-judged.md")

    def logs(self) -> Iterator[Step]:
        """DH-ICL: a log of what ten of ten samples got right, and its tables."""
        words = [
            "label",
            "--data",
            "bench:triviaqa_ctx/train",
            "--limit",
            self.few(4_460),
            "--model",
            self.model,
            "--closed-book",
        ]
        yield Step("log-label", [*words, *DRAWN, "--layers", "none", "--out", self.at("log-train")])
        words = ["history", "import", self.at("log-train"), "--rule", "all", "--history", self.at("log.db")]
        words += ["--time-sensitive", "bench:uar_gate_time/train"]
        yield Step("log-import", words, self.work / "log.db")
        criteria = ",".join(f"{name}=bench:uar_gate_{name}/train" for name in ("intent", "knowledge", "time"))
        words = ["fit", "uar", "--labels", self.full("triviaqa_ctx-train"), "--criteria", criteria]
        yield Step("log-fit-uar", [*words, "--model", self.model, "--out", self.at("uar")], self.work / "uar")
        runs = [word for name in LOGGED for word in ("--labels", self.full(f"{name}-test"))]
        words = ["sweep", "dhicl", *runs, "--history", self.at("log.db"), "--model", self.model, "--markdown"]
        words += ["--gates", f"{self.at('uar')},skr:{self.at('log.db')},flare,logprob:min"]
        yield Step("log-sweep", words, shown="dhicl.md")
        words = ["sweep", "latency", "--data", "bench:triviaqa_ctx/test", "--model", self.model, "--markdown"]
        words += ["--gates", f"dhicl:{self.at('log.db')},{self.at('uar')},skr:{self.at('log.db')},flare,logprob:min"]
        yield Step("log-latency", words, shown="latency.md")

    def self_assessment(self) -> Iterator[Step]:
        """KB-SAT: 1,500 questions, as many known as unknown ones among those kept; UAR beside it."""
        words = ["label", "--data", "bench:triviaqa_ctx/test", "--limit", self.few(1_500), "--model", self.model]
        words += [*DRAWN, "--closed-book", "--layers", "none", "--kb-sat", self.at("kbsat.jsonl")]
        yield Step("sat-label", [*words, "--out", self.at("kbsat")])
        for kind in ("", ".swapped", ".rare"):
            words = ["eval-self", "--data", f"jsonl:{self.at(f'kbsat{kind}.jsonl')}", "--model", self.model]
            words += ["--words", WORDS, "--judge", "self", "--history", self.at("log.db"), "--gates", self.at("uar")]
            yield Step(f"sat-eval{kind}", [*words, "--json"], shown=f"kbsat{kind}.jsonl")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--samples", type=int, default=30, help="closed-book samples of each question")
    parser.add_argument("--plug-into", type=Path, nargs="*", default=[], help="full runs of other LLMs to decide about")
    parser.add_argument("--most", type=int, default=100_000, help="questions of any run, at most; to try the plan out")
    options = vars(parser.parse_args())
    only, shows = options.pop("only"), options.pop("print")
    plan = Plan(**options)
    out = plan.work / "out" if shows else begin(plan.bench, plan.work)
    took = walk(plan.steps(), out, only, shows=shows)
    if not shows:
        print(f"{took:.0f} s in all; tables: {out}")


if __name__ == "__main__":
    main()
