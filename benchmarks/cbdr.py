"""CBDR end to end: Tables 1 to 3 and the alignment they rest on, every step a `knowgate` command.

    python -m benchmarks.cbdr --model hf:FOLDER --bench FOLDER --work FOLDER [--only NAME ...] [--print]

Steps are run in one process, so that weights are read once; each is a command that --print shows as one would type it.
What is done already is not done again: commands go on where they stopped, and fitted folders that are there stay. What
is to be kept (tables, predictions, manifests, seconds of each step; no questions, no passages) comes to WORK/out.

The paper has Llama-3-8B, bge-reranker-v2-m3 and 7,622 training questions of NQ; here the base is a MiniLM that is
taught relevance first, the candidates come from the pooled corpora of the benchmark folder, and the test questions are
those of NQ and, as data the reranker was not aligned on, HotpotQA.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.steps import ENGLISH, Step, arguments, begin, walk

SOURCES = ("confidence", "likelihood", "benefit")
LEARNT, ASKED = ("nq", "triviaqa"), ("nq", "hotpotqa")  # data sets preferences are learnt on, and measured on
TOPS = (1, 3)


@dataclass(frozen=True)
class Plan:
    """All steps, in their order."""

    model: str
    bench: Path
    work: Path
    base: str
    train: int
    labelled: int
    test: int
    relevance: int
    candidates: int
    cut: int

    def at(self, *parts: str) -> str:
        return str(self.work.joinpath(*parts))

    def steps(self) -> Iterator[Step]:
        yield Step("index", ["index", self.at("pooled.jsonl.gz"), "--out", self.at("idx")], self.work / "idx")
        yield from self.labels()
        yield from self.fits()
        yield from self.preferences()
        yield from self.alignments()
        yield self.tables_1_and_2()
        yield from self.table_3()

    def labels(self) -> Iterator[Step]:
        """What the LLM knows: the probe learns from it, and preferences are of these questions."""
        for part, names, limit in (("train", LEARNT, self.labelled), ("test", ASKED, self.test)):
            for name in names:
                words = ["label", "--data", f"bench:{name}_ctx/{part}", "--limit", str(limit), "--model", self.model]
                words += ["--samples", "0", "--closed-book", "--layers", "mid", "--out", self.at(f"{name}-{part}")]
                yield Step(f"label-{name}-{part}", words)

    def fits(self) -> Iterator[Step]:
        """The probe of knowing, on balanced classes; the base reranker, taught which passages hold an answer."""
        from knowgate.training.probe import fit_probe

        runs = [word for name in LEARNT for word in ("--labels", self.at(f"{name}-train"))]
        balanced = ["--balanced"] if "balanced" in inspect.signature(fit_probe).parameters else []
        words = ["fit", "probe", *runs, "--target", "known", "--layer", "mid", *balanced, "--out", self.at("probe")]
        yield Step("fit-probe", words, self.work / "probe")
        data = [word for name in ENGLISH for word in ("--relevance", f"bench:{name}_ctx/train")]
        words = ["fit", "reranker", *data, "--relevance-index", self.at("idx"), "--limit", str(self.relevance)]
        words += ["--base", self.base, "--out", self.at("relevance")]
        yield Step("fit-relevance", words, self.work / "relevance")

    def preferences(self) -> Iterator[Step]:
        for source in SOURCES:
            yield from self.preferred(source, source, [])
        yield from self.preferred("cut", "confidence", ["--cut", str(self.cut)])

    def preferred(self, name: str, source: str, options: list[str]) -> Iterator[Step]:
        runs = [word for data in LEARNT for word in ("--labels", self.at(f"{data}-train"))]
        yield self.prefer(f"{name}-train", [*runs, "--limit", str(self.train)], source, "train", options)
        for data in ASKED:
            yield self.prefer(f"{name}-{data}", ["--labels", self.at(f"{data}-test")], source, "test", options)

    def prefer(self, name: str, runs: list[str], source: str, split: str, options: list[str]) -> Step:
        words = ["prefer", *runs, "--source", source, "--index", self.at("idx"), "--candidates", str(self.candidates)]
        words += ["--gate", self.at("probe")] if source == "confidence" else []
        words += ["--split", split, "--model", self.model, *options, "--out", self.at(f"pref-{name}")]
        return Step(f"prefer-{name}", words)

    def alignments(self) -> Iterator[Step]:
        for name in (*SOURCES, "cut"):
            yield self.align(f"aligned-{name}", name, [])
        yield self.align("unread", "confidence", ["--question-unread"])

    def align(self, out: str, source: str, options: list[str]) -> Step:
        words = ["fit", "reranker", "--pref", self.at(f"pref-{source}-train"), "--base", self.at("relevance")]
        return Step(f"fit-{out}", [*words, *options, "--out", self.at(out)], self.work / out)

    def tables_1_and_2(self) -> Step:
        folders = [f"pref-{name}-{part}" for name in (*SOURCES, "cut") for part in ("train", *ASKED)]
        words = ["eval-rerank", *(word for name in folders for word in ("--pref", self.at(name)))]
        rankers = [*(f"aligned-{name}" for name in (*SOURCES, "cut")), "unread"]
        words += [word for name in rankers for word in ("--rerank", self.at(name))]
        words += ["--base", self.at("relevance"), "--model", self.model, "--top", ",".join(map(str, TOPS))]
        return Step("tables-1-2", [*words, "--controls", "--out", self.at("compared")], shown="rerank.txt")

    def table_3(self) -> Iterator[Step]:
        """NQ answered with the passages of each ranker, then beta over all of it."""
        runs = []
        for ranker in ("bm25", "relevance", *(f"aligned-{source}" for source in SOURCES)):
            for k in TOPS:
                run = self.at(f"nq-{ranker}-{k}")
                rerank = ["--rerank", self.at(ranker), "--candidates", str(self.candidates)] if ranker != "bm25" else []
                words = ["label", "--data", "bench:nq_ctx/test", "--limit", str(self.test), "--model", self.model]
                words += ["--index", self.at("idx"), *rerank, "--k", str(k), "--samples", "0", "--layers", "mid"]
                yield Step(f"label-nq-{ranker}-{k}", [*words, "--out", run])
                runs += ["--labels", run]
        yield Step("table-3", ["sweep", "beta", *runs, "--gates", self.at("probe"), "--markdown"], shown="beta.md")


def keep(plan: Plan, out: Path) -> None:
    """Tables, predictions and manifests; nothing with a question or passage in it."""
    for name in ("rerank.md", "rerank.json", "predictions.jsonl"):
        if (file := plan.work / "compared" / name).is_file():
            shutil.copyfile(file, out / name)
    for name in ("reranker.json", "relevance.json", "pref.json", "gate.json", "run.json"):
        for file in sorted(plan.work.glob(f"*/{name}")):
            shutil.copyfile(file, out / f"{file.parent.name}.{name}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--base", default="minilm", help="cross-encoder that is taught relevance")
    parser.add_argument("--train", type=int, default=3_200, help="questions preferences are measured on, to learn from")
    parser.add_argument("--labelled", type=int, default=5_000, help="training questions of each set the LLM answers")
    parser.add_argument("--test", type=int, default=500, help="test questions of each data set")
    parser.add_argument("--relevance", type=int, default=1_800, help="questions of each of four sets, for relevance")
    parser.add_argument("--candidates", type=int, default=10, help="passages of each question")
    parser.add_argument("--cut", type=int, default=64, help="tokens of each passage in the control of equal length")
    options = vars(parser.parse_args())
    only, shows = options.pop("only"), options.pop("print")
    plan = Plan(**options)
    out = plan.work / "out" if shows else begin(plan.bench, plan.work)
    took = walk(plan.steps(), out, only, shows=shows)
    if not shows:
        keep(plan, out)
        print(f"{took:.0f} s in all; to keep: {out}")


if __name__ == "__main__":
    main()
