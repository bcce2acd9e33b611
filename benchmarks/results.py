"""benchmarks/RESULTS.md from the recorded runs in benchmarks/runs: `make results`. No LLM, no benchmark data needed.

Every table is computed anew from the rows and needs on record; nothing is copied from an earlier run of this script.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
RUNS = HERE / "runs"
MODELS = {
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct (Q4_K_M weights, run in bf16 on one H200)",
    "smollm": "SmolLM2-135M-Instruct (the embedded model, run in fp32)",
}
DATA = ("triviaqa_ctx", "nq_ctx", "squad_ctx", "hotpotqa_ctx", "webqa_zh_ctx", "openbookqa")
SIGN = "dhicl:k=20,words=true/false,sign="
NAMES = {f"{SIGN}paper": "dhicl", f"{SIGN}code": "dhicl, code's sign", f"{SIGN}none": "dhicl, not calibrated"}
RESAMPLES = 2_000
DRAWS = 1_000
EPSILONS = (0.01, 0.02, 0.05, 0.1)
DELTA = 0.05
Rows = list[tuple[str, ...]]


def table(columns: Sequence[str], rows: Rows) -> str:
    lines = [tuple(columns), ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def bold_best(rows: Rows, columns: Sequence[int], skip: Sequence[str] = ()) -> Rows:
    """The highest number of each column in bold; what it is measured by is its first number."""
    cells = [list(row) for row in rows]
    for column in columns:
        values = [_first(row[column]) if row[0] not in skip else -np.inf for row in rows]
        best = max(values)
        for place, value in enumerate(values):
            if np.isfinite(best) and value == best:
                cells[place][column] = f"**{cells[place][column]}**"
    return [tuple(row) for row in cells]


def _first(cell: str) -> float:
    try:
        return float(cell.split()[0])
    except (ValueError, IndexError):
        return -np.inf


def evaluations(model: str, names: Sequence[str] = DATA) -> dict[str, Any]:
    """Every data set of a model with all gates on record and all that rows allow."""
    from knowgate.evaluation.comparison.evaluation import compare
    from knowgate.gates.recorded import score_gates
    from knowgate.runs.trial import load_trial

    found = {}
    for name in names:
        run = RUNS / model / f"{name}-test"
        if not run.is_dir():
            continue
        trial = load_trial([run], layers=())
        scored = [one for one in score_gates(trial, ["auto"]) if _is_shown(one.name)]
        found[name] = compare(trial, scored, resamples=RESAMPLES)
    return found


def _is_shown(gate: str) -> bool:
    """Variants of DH-ICL have a table of their own."""
    return not gate.startswith("dhicl") or gate in NAMES


def shown(gate: str) -> str:
    return NAMES.get(gate, gate)


# --- the main tables ------------------------------------------------------------------------------


def facts(found: dict[str, Any]) -> str:
    rows: Rows = []
    for name, one in found.items():
        trial = one.trial
        values = [one.gate(line).measures["accuracy"].value for line in ("never", "always", "oracle")]
        hurt = float((trial.closed_right & ~trial.open_right).mean())
        rows.append((name, str(len(trial.rows)), *(f"{value:.3f}" for value in values), f"{hurt:.3f}"))
    return table(("data set", "test questions", "never", "always", "oracle", "retrieval hurts"), rows)


def gate_names(found: dict[str, Any]) -> list[str]:
    names: dict[str, None] = {}
    for one in found.values():
        names |= {gate.gate: None for gate in one.gates if "auroc" in gate.measures}
    return list(names)


def by_data(found: dict[str, Any], cell: Any) -> str:
    """Gates down, data sets across."""
    rows: Rows = []
    for gate in gate_names(found):
        have = {name: next((g for g in one.gates if g.gate == gate), None) for name, one in found.items()}
        rows.append((shown(gate), *("–" if g is None else cell(g) for g in have.values())))
    return table(("gate", *found), bold_best(rows, range(1, len(found) + 1)))


def auroc_cell(gate: Any) -> str:
    value = gate.measures["auroc"]
    if value.value is None:
        return "–"
    return f"{value.value:.3f} [{value.low:.2f}, {value.high:.2f}]"


def rate_cell(rate: float) -> Any:
    def cell(gate: Any) -> str:
        straight = gate.frontier.accuracies[0] * (1 - rate) + gate.frontier.accuracies[-1] * rate
        return f"{100 * (gate.at_rate[rate] - straight):+.1f}"

    return cell


def tuned_cell(gate: Any) -> str:
    tuned = gate.tuned
    return f"{100 * (tuned.accuracy - tuned.always):+.1f} @ {100 * tuned.rate:.0f} %"


def benefit_cell(gate: Any) -> str:
    value = gate.measures["auroc_benefit"]
    return f"{value.value:.3f} [{value.low:.2f}, {value.high:.2f}]"


def judged_cell(gate: Any) -> str:
    return f"{gate.measures['judged'].value:.3f}"


def ece_cell(gate: Any) -> str:
    return f"{gate.measures['ece'].value:.3f}"


def main_tables(model: str, title: str) -> Iterator[str]:
    found = evaluations(model)
    if not found:
        return
    yield f"## {title}\n"
    yield facts(found)
    yield '\n**AUROC of "does not know"** (95 % bootstrap interval; best of a column in bold).\n'
    yield by_data(found, auroc_cell)
    yield '\n**AUROC of "retrieval turns the answer right"** (benefit).\n'
    yield by_data(found, benefit_cell)
    for rate in (0.75, 0.5):
        yield f"\n**Accuracy at {rate:.0%} retrieval, points above retrieving at random** (exact top-k).\n"
        yield by_data(found, rate_cell(rate))
    yield (
        "\n**Threshold chosen on 30 % of the test questions, realised on the others: points against always retrieving "
        "@ retrieval rate.** 0.0 @ 100 % means that the dev share showed nothing to skip.\n"
    )
    yield by_data(found, tuned_cell)
    yield "\n**Accuracy of the verdict known / unknown at the gate's threshold.**\n"
    yield by_data(found, judged_cell)
    yield "\n**ECE of need as the probability of not knowing** (lower is better; nothing in bold).\n"
    yield by_data(found, ece_cell).replace("**", "")
    yield from fusion_against_parts(found)


def fusion_against_parts(found: dict[str, Any]) -> Iterator[str]:
    """Where fusion is above each of its parts, and where not; paired over the same resamples."""
    from knowgate.statistics.bootstrap import estimate, p_value

    parts = ("logprob:first", "logprob:mean", "logprob:min", "logprob:entropy", "logprob:margin", "prompt", "seakr",
             "probe", "probe, linear", "probe after draft")  # fmt: skip
    rows: Rows = []
    for name, one in found.items():
        have = {gate.gate: gate for gate in one.gates}
        inside = [have[part] for part in parts if part in have]
        if "fusion" not in have or not inside:
            continue
        if have["fusion"].measures["auroc"].value is None:
            continue
        best = max(inside, key=lambda gate: gate.measures["auroc"].value)
        difference = have["fusion"].drawn["auroc"] - best.drawn["auroc"]
        gap = estimate(difference)
        verdict = "above" if gap.low > 0 else "below" if gap.high < 0 else "not told apart"
        interval = f"{gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"
        own, other = (f"{gate.measures['auroc'].value:.3f}" for gate in (have["fusion"], best))
        rows.append((name, own, best.gate, other, interval, f"{p_value(difference):.3f}", verdict))
    yield "\n**Fusion against the best of its parts on that data set** (AUROC; paired bootstrap).\n"
    yield table(("data set", "fusion", "best part", "its AUROC", "difference", "p", "fusion is"), rows)


# --- recorded Llama answers -----------------------------------------------------------------------


LLAMA = ("skr", "ik, text", "adaptive", "fusion", "fusion on benefit")


def llama_tables() -> Iterator[str]:
    from knowgate.evaluation.comparison.evaluation import compare
    from knowgate.gates.recorded import score_gates
    from knowgate.runs.trial import load_trial

    run = RUNS / "llama3.1-8b" / "gate_llama3_8b-test"
    if not run.is_dir():
        return
    yield "## Llama-3.1-8B-Instruct, recorded answers (`gate_llama3_8b`): nothing but text\n"
    yield (
        "Answers recorded by others, open-book with one BM25 retrieval. No log-probabilities, no "
        "hidden states: gates see "
        "question and answer text alone, through the packaged MiniLM embeddings. Gain: points above "
        "retrieving at random "
        "at the same rate. Tuned: threshold chosen on 30 % of the rows, realised on the others, in points against the "
        "better of never and always there.\n"
    )
    trial = load_trial([run], layers=())
    kinds = [str(row.meta.get("dataset", "-")) for row in trial.rows]
    rows: Rows = []
    for kind in ["all", *sorted(set(kinds))]:
        places = [place for place, own in enumerate(kinds) if kind in ("all", own)]
        part = trial.subset(places)
        found = compare(part, score_gates(part, LLAMA), resamples=RESAMPLES)
        lines = " / ".join(
            f"{found.gate(name).measures['accuracy'].value:.3f}" for name in ("never", "always", "oracle")
        )
        rows += [(f"{kind} ({len(places)})", lines, name, *_llama_cells(found.gate(name))) for name in LLAMA]
    columns = (
        "data set (n)",
        "never / always / oracle",
        "gate",
        "AUROC of not known",
        "gain at 75 %",
        "gain at 50 %",
        "tuned",
    )
    yield table(columns, rows)


def _llama_cells(gate: Any) -> tuple[str, ...]:
    never, tuned = gate.frontier.accuracies[0], gate.tuned
    better = max(tuned.always, never)
    return (auroc_cell(gate), rate_cell(0.75)(gate), rate_cell(0.5)(gate),
            f"{100 * (tuned.accuracy - better):+.1f} @ {100 * tuned.rate:.0f} %")  # fmt: skip


# --- DH-ICL: variants and KB-SAT ------------------------------------------------------------------


def variant_table() -> Iterator[str]:
    from knowgate.evaluation.sweeps import auroc_of
    from knowgate.gates.recorded import score_gate
    from knowgate.runs.trial import load_trial

    run = RUNS / "qwen2.5-coder-1.5b" / "triviaqa_ctx-test"
    if not run.is_dir():
        return
    trial = load_trial([run], layers=())
    found: dict[str, dict[str, float]] = {}
    for name in trial.recorded:
        if name.startswith("dhicl:"):
            what, sign = name.removeprefix("dhicl:").split(",sign=")
            found.setdefault(what, {})[sign] = auroc_of(trial, score_gate(trial, name))
    yield "## DH-ICL: how many examples, which label words, which sign (Qwen, triviaqa_ctx)\n"
    yield 'AUROC of "does not know"; the log is the train run, 21 % known.\n'
    rows = [(what, *(f"{values[sign]:.3f}" for sign in ("none", "paper", "code"))) for what, values in found.items()]
    yield table(("variant", "not calibrated", "paper's sign", "code's sign"), rows)


def kbsat_table() -> Iterator[str]:
    file = RUNS / "kbsat-qwen2.5-coder-1.5b.json"
    if not file.is_file():
        return
    yield "## KB-SAT: does the LLM know what it knows? (Qwen)\n"
    yield (
        "Balanced: as many questions answered right as wrong, so 0.5 is chance. Swapped: known "
        "questions with an entity "
        "of another question (right: unknown). Rare: a rare word in front of known questions (right: known).\n"
    )
    rows = [
        (one["data"], one["set"], one["words"], one["method"], str(one["n"]), f"{one['accuracy']:.3f}",
         f"{one['predicted_known']} / {one['predicted_unknown']}",
         "–" if one["auroc"] is None else f"{one['auroc']:.3f}")
        for one in json.loads(file.read_text())
        if one["words"] == "true/false" or one["set"] == "balanced"
    ]  # fmt: skip
    yield table(("data set", "set", "words", "method", "n", "accuracy", "said known / unknown", "AUROC"), rows)


# --- reranker -------------------------------------------------------------------------------------


def rerank_table() -> Iterator[str]:
    """CBDR's tables as `benchmarks/cbdr.py` left them; until then, those of a short run on the embedded model."""
    folder = RUNS / "cbdr"
    if not (folder / "rerank.md").is_file():
        yield from _short_rerank_table(RUNS / "rerank.md")
        return
    preferred = json.loads((folder / "pref-confidence-train.pref.json").read_text())
    relevance = json.loads((folder / "relevance.relevance.json").read_text())
    settings, counts = preferred["settings"], preferred["totals"]
    yield "## Rerankers aligned with an LLM, and confidence-based retrieval (CBDR)\n"
    yield (
        f"Recorded by `benchmarks/cbdr.py`: {settings['model']}, {settings['candidates']} candidates of the pooled "
        f"corpora by {settings['retriever']}; preferences of {counts['done']:,} training questions "
        f"({counts['kept']:,} have passages of both kinds by confidence). The base is {relevance['base']}, taught "
        f"relevance by {relevance['losses']['groups']:,} questions; `unread` is aligned by confidence without being "
        "shown the question, `aligned-cut` on passages of one length. 95 % bootstrap intervals over questions; "
        "differences are paired.\n"
    )
    yield (folder / "rerank.md").read_text()
    yield "### Beta, reranker and passages shown (CBDR, Table 3)\n"
    yield (folder / "beta.md").read_text()


def _short_rerank_table(file: Path) -> Iterator[str]:
    if file.is_file():
        yield "## Reranker aligned with the LLM's confidence (CBDR)\n"
        yield "A short run on preferences made with `knowgate prefer`; `benchmarks/cbdr.py` is the whole of it.\n"
        lines = file.read_text().splitlines()[2:]  # without its own title
        yield "\n".join(f"#{line}" if line.startswith("##") else line for line in lines) + "\n"


def matrices() -> Iterator[str]:
    file = RUNS / "matrices.md"
    if file.is_file():
        yield "## Fitted on one data set or LLM, used on another\n"
        yield file.read_text()


# --- the guarantee --------------------------------------------------------------------------------


def guarantee_table() -> Iterator[str]:
    from knowgate.gates.recorded import score_gate
    from knowgate.runs.trial import load_trial
    from knowgate.thresholds.guarantee import learn_then_test
    from knowgate.thresholds.outcomes import Outcomes

    model = "qwen2.5-coder-1.5b"
    runs = [RUNS / model / f"{name}-test" for name in DATA]
    if not all(run.is_dir() for run in runs):
        return
    trial = load_trial(runs, layers=())
    assert trial.open_right is not None
    yield "## The guarantee, kept?\n"
    yield (
        f"All {len(trial.rows)} test questions of Qwen stand for the population. {DRAWS} times, half "
        "as many are drawn from "
        f"them with replacement and the threshold is chosen on those (Learn-then-Test, confidence "
        f"{1 - DELTA:.0%}); its risk "
        "in the population, the share of questions skipped to their harm, is then known exactly and "
        "must exceed epsilon in "
        f"at most {DELTA:.0%} of the draws. Loss is always minus accuracy; it is lower than the risk "
        "because skipping also "
        "saves answers that passages would have destroyed.\n"
    )
    rows: Rows = []
    harm, n = trial.open_right & ~trial.closed_right, len(trial.rows)
    for name in ("fusion", "ik-lora-32", "logprob:min"):
        needs = score_gate(trial, name).needs
        for epsilon in EPSILONS:
            rng = np.random.default_rng(0)
            found = []
            for _ in range(DRAWS):
                drawn = rng.integers(0, n, n // 2)
                chosen = learn_then_test(
                    Outcomes(needs[drawn], trial.closed_right[drawn], trial.open_right[drawn]), epsilon, DELTA
                )
                skip = needs <= chosen.threshold
                right = np.where(skip, trial.closed_right, trial.open_right)
                found.append((1 - skip.mean(), (skip & harm).mean(), trial.open_right.mean() - right.mean()))
            rates, risks, losses = np.array(found).T
            rows.append((name, f"{epsilon:.0%}", f"{rates.mean():.1%}", f"{risks.mean():.2%}", f"{losses.mean():+.2%}",
                         f"{np.quantile(losses, 0.95):+.2%}", f"{(risks > epsilon).mean():.1%}"))  # fmt: skip
    columns = (
        "gate",
        "epsilon",
        "retrieval rate",
        "mean risk",
        "mean loss",
        "95 % of losses below",
        "draws with risk above epsilon",
    )
    yield table(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    options = parser.parse_args()
    parts = [(HERE / "results_intro.md").read_text()]
    for model, title in MODELS.items():
        parts += main_tables(model, title)
    for section in (llama_tables, variant_table, kbsat_table, rerank_table, matrices, guarantee_table):
        parts += section()
    options.out.write_text("\n".join(parts))
    print(options.out.name, len("\n".join(parts)), "characters")


if __name__ == "__main__":
    main()
