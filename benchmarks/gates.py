"""Every gate that can be scored from recorded rows, fitted on one label run and measured on another. No LLM is run.

    python benchmarks/gates.py --test RUN [--train RUN] [--gate FITTED] [--by dataset]

Columns: AUROC of "does not know", accuracy of that at 0.5, ECE; then the share retrieved for at the gate's threshold,
the accuracy of the answers at that share, and what retrieving at random as often would give. `--by dataset` repeats
the table for each meta.dataset of the test run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Test:
    """The rows to measure on."""

    rows: list[Any]
    questions: list[Any]
    readings: list[Any]

    @property
    def known(self) -> Any:
        return np.array([row.closed.correct for row in self.rows])

    @property
    def opened(self) -> Any:
        return np.array([row.open.correct if row.open else False for row in self.rows])


def load_test(run: Path, layers: Sequence[int]) -> Test:
    from knowgate.labels.readings import question_of, recorded
    from knowgate.labels.run import RunFolder

    folder = RunFolder(run)
    rows = [row for row in folder.rows() if row.error is None and row.closed.correct is not None]
    return Test(rows, [question_of(row) for row in rows], recorded(folder, rows, layers))


def plain_gates(test: Test) -> dict[str, Any]:
    """Gates that need no fitting, as far as the rows have their signals."""
    from knowgate.gates import load_gate

    reading = test.readings[0]
    specs = []
    if reading.draft is not None and reading.draft.tokens:
        specs += [f"logprob:{name}" for name in ("first", "mean", "min", "entropy", "margin")] + ["flare"]
    if "prompt" in reading.labels:
        specs.append("prompt")
    return {spec: load_gate(spec) for spec in specs}


def fitted_gates(runs: list[Path], folder: Path, target: str) -> dict[str, Any]:
    """Fit what these runs allow; what they do not is said and left out."""
    from knowgate.errors import KnowgateError
    from knowgate.fit.adaptive import fit_adaptive
    from knowgate.fit.data import load_examples
    from knowgate.fit.fusion import fit_fusion
    from knowgate.fit.ik import fit_ik_text
    from knowgate.fit.probe import fit_probe
    from knowgate.fit.save import save_fitted
    from knowgate.gates import load_gate

    makers: dict[str, Callable[[Any], Any]] = {
        "probe pre, linear": lambda ex: fit_probe(ex, kind="linear"),
        "probe pre, network": lambda ex: fit_probe(ex, kind="mlp"),
        "probe post, linear": lambda ex: fit_probe(ex, position="post", kind="linear"),
        "ik, text": lambda ex: fit_ik_text(ex),
        "adaptive": lambda ex: fit_adaptive(ex),
        "fusion, cheap": lambda ex: fit_fusion(ex, cheap=True),
        "fusion": lambda ex: fit_fusion(ex),
    }
    gates = {}
    for name, make in makers.items():
        try:
            examples = load_examples(runs, target=target)
            out = folder / name.replace(" ", "-").replace(",", "")
            save_fitted(make(examples), examples, out)
            gates[f"{name} ({target})"] = load_gate(str(out), plug_in=True)
        except KnowgateError as error:
            print(f"left out: {name}: {error}")
    return gates


def neighbour_gate(runs: list[Path], folder: Path, test: Test) -> dict[str, Any]:
    """SKR on a log of the training runs."""
    from knowgate.gates.skr import SkrGate
    from knowgate.history.sqlite import SqliteHistory
    from knowgate.labels.logbook import entries_of, scope_of
    from knowgate.labels.run import RunFolder

    log = SqliteHistory(folder / "log.db")
    scope = scope_of(RunFolder(runs[0]).manifest()["settings"])
    for run in runs:
        entries = list(entries_of(RunFolder(run).rows(), scope))
        for place in range(0, len(entries), 256):
            log.add(entries[place : place + 256])
    return {"skr": SkrGate(log, scope=scope)}


def show(title: str, test: Test, needs: dict[str, tuple[Any, float]], places: Any) -> None:
    from knowgate.fit.metrics import measure

    known, opened = test.known[places], test.opened[places]
    print(f"\n{title}: {len(known)} questions; never {known.mean():.3f}, always {opened.mean():.3f}, "
          f"oracle {(known | opened).mean():.3f}")  # fmt: skip
    print(f"{'gate':28} {'AUROC':24} {'accuracy':9} {'ECE':6} {'rate':6} {'answers':8} random")
    for name, (values, threshold) in needs.items():
        need = values[places]
        found = measure(~known, need)
        retrieve = need > threshold
        answers = np.where(retrieve, opened, known).mean()
        chance = retrieve.mean() * opened.mean() + (1 - retrieve.mean()) * known.mean()
        print(
            f"{name:28} {found['auroc'].shown():24} {found['accuracy'].value:9.3f} {found['ece'].value:6.3f} "
            f"{retrieve.mean():6.1%} {answers:8.3f} {chance:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, action="append", default=[], help="label run to fit on; may be repeated")
    parser.add_argument("--gate", type=Path, action="append", default=[], help="a gate that is already fitted")
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--by", default="", help="a key of meta to repeat the table for")
    options = parser.parse_args()
    from knowgate.gates import load_gate, score
    from knowgate.gates.reading import read_questions
    from knowgate.labels.readings import recorded_layers
    from knowgate.labels.run import RunFolder

    test = load_test(options.test, recorded_layers(RunFolder(options.test)))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        gates = plain_gates(test)
        gates |= {path.name: load_gate(str(path), plug_in=True) for path in options.gate}
        for target in ("known", "benefit") if options.train else ():
            gates |= fitted_gates(options.train, folder / target, target)
        needs = {
            name: (np.array(score(gate, test.questions, test.readings)), gate.threshold) for name, gate in gates.items()
        }
        logged = neighbour_gate(options.train, folder, test) if options.train else {}
        for name, gate in logged.items():
            readings = read_questions(None, [gate], test.questions, None)  # type: ignore[arg-type]
            needs[name] = (np.array(score(gate, test.questions, readings)), gate.threshold)
    every = np.arange(len(test.rows))
    show("all", test, needs, every)
    if options.by:
        kinds = np.array([str(row.meta.get(options.by, "-")) for row in test.rows])
        for kind in sorted(set(kinds)):
            show(kind, test, needs, np.flatnonzero(kinds == kind))


if __name__ == "__main__":
    main()
