"""`knowgate sweep` and `knowgate eval-self`: the experiments of the papers behind the gates, on your own data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import create_console, inform, print_json, print_tables
from knowgate.cli.option_flags import expand_options
from knowgate.cli.options import GatesOption, JsonOption, LabelsOption, parse_integers, path_option, split_gate_specs
from knowgate.core.display import TextTable, render_markdown_tables
from knowgate.core.options import Count, Options, Seed, option
from knowgate.data.questions import load_questions
from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadSetting, require_extra
from knowgate.gates.offline_scoring import drop_seen_rows, score_gates
from knowgate.models import load_model
from knowgate.models.prompts.answers import load_answer_prompts
from knowgate.papers import sweeps
from knowgate.papers.cbdr_tables import build_beta_tables
from knowgate.papers.dhicl_tables import EXAMPLE_COUNTS, LABEL_WORD_PAIRS, DhiclVariants, build_dhicl_tables
from knowgate.papers.self_assessment import SelfAssessment, SelfAssessor
from knowgate.types import Model, Question

app = typer.Typer(help="Vary one setting of a gate, such as the threshold, and show a table of the results.")
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]


class GateSweepOptions(Options):
    """Options of `knowgate sweep thresholds` and `knowgate sweep beta`."""

    plug_in: bool = option(False, "Allow gates that were fitted on another LLM than yours.", flag="--plug-in")
    drop_seen: bool = option(False, "Leave out questions that a gate was fitted on.", flag="--drop-seen")
    markdown: bool = option(False, "Print the tables as Markdown.", flag="--markdown")


@app.command()
@expand_options
def thresholds(labels: LabelsOption, options: GateSweepOptions, gates: GatesOption = None) -> None:
    """Measure gates at every threshold from 0.1 to 0.9, as in the IK paper.

    Example: knowgate sweep thresholds --labels runs/test --gates my-ik
    """
    specs = split_gate_specs(gates, labels)
    table = load_label_table(labels)
    if options.drop_seen:
        table = drop_seen_rows(table, specs)
    scores = score_gates(table, specs, plug_in=options.plug_in)
    _print([sweeps.sweep_thresholds(table, gate) for gate in scores], options.markdown)


@app.command()
@expand_options
def beta(labels: LabelsOption, options: GateSweepOptions, gates: GatesOption = None) -> None:
    """Measure gates that skip retrieval if their confidence is above beta, as in the CBDR paper.

    Beta goes from 0.5 to 0.98. The confidence of a fitted gate is its uncalibrated probability that the LLM knows the
    answer. The paper's probe is fitted with --target known --balanced. The confidence of other gates is 1 - need.

    The table shows the accuracy and retrieval rate for each beta. It also shows the difference in accuracy to always
    retrieving, with a 95 % interval. Runs may have the same questions with different passages (`label --rerank`,
    `--k`). Then there is one column per k, and the rows are rerankers and values of beta. A cell
    such as 61.7 % (92.9 %) is the accuracy and, in parentheses, the retrieval rate.

    Example: knowgate sweep beta --labels runs/test --labels runs/test-reranked --gates my-probe
    """
    specs = split_gate_specs(gates, labels)
    tables = build_beta_tables(labels, specs, plug_in=options.plug_in, drop_seen=options.drop_seen)
    _print(tables, options.markdown)


@app.command()
def variants(
    labels: LabelsOption,
    gate: Annotated[str, typer.Option(help="Show the stored gates whose names start with this text.")] = "dhicl",
    markdown: AsMarkdown = False,
) -> None:
    """Compare stored decisions of variants of a gate, such as DH-ICL with different k.

    `knowgate eval --data` stores decisions.

    Example: knowgate sweep variants --labels runs/test --gate dhicl
    """
    _print([sweeps.sweep_variants(load_label_table(labels), gate)], markdown)


@app.command()
def transfer(
    train: Annotated[list[Path], path_option("RUN", "Label run to fit on (recorded answers). May be repeated.")],
    labels: LabelsOption,
    fit: Annotated[str, typer.Option(help="Gate to fit, with options if needed. Example: ik:tokens=8")] = "fusion",
    markdown: AsMarkdown = False,
) -> None:
    """Fit a gate on each training run, and show its AUROC on each test run.

    Example: knowgate sweep transfer --train runs/nq-train --train runs/squad-train --labels runs/nq-test
    """
    with require_extra("fitting", "train"):
        table = sweeps.sweep_transfer(fit, train, labels, inform)
    _print([table], markdown)


@app.command("plug-in")
def plug_in_matrix(labels: LabelsOption, gates: GatesOption = None, markdown: AsMarkdown = False) -> None:
    """Show the AUROC of each gate on each run.

    A * marks gates fitted on another LLM.

    Example: knowgate sweep plug-in --gates gate-of-a,gate-of-b --labels runs-of-a --labels runs-of-b
    """
    if not gates:
        raise BadSetting("`sweep plug-in` compares fitted gates, but got none. Give their folders: --gates GATE,GATE")
    _print([sweeps.sweep_plug_in(split_gate_specs(gates, labels), labels)], markdown)


class IkSweepOptions(Options):
    """Options of `knowgate sweep ik`."""

    test: list[Path] = option([], "Label run to test on; repeatable. Default: the test split.", metavar="RUN")
    tokens: str = option(
        "0,8,32,128", "Draft lengths to compare, in tokens that the judge reads (T in the paper), separated by commas."
    )
    rows: str = option("all", "Training set sizes to compare, such as 100,500,all. `all` stands for all questions.")
    grades: str = option(
        "",
        "Graders to compare, from whose grades the judge learns, separated by commas: `exact`, `contains` or `judge`. "
        "Default: the grader that the label runs used.",
    )
    judge: str | None = option(None, "LLM that grades the answers. Used with --grades judge.")
    mode: str = option("lora", "Kind of judge: `lora` (a fine-tuned LLM) or `text` (a classifier on embeddings).")
    base: str | None = option(None, "Model to fine-tune. Default: the LLM of the label runs.")
    epochs: Count | None = option(
        None, "Number of passes over the training questions. Default: the same as for `knowgate fit ik`."
    )
    out: Path | None = option(None, "Folder to store the judges in. An interrupted run continues there.", metavar="DIR")
    seed: Seed = option(0, "Random seed of splits, samples and training.")


@app.command()
@expand_options
def ik(labels: LabelsOption, options: IkSweepOptions, markdown: AsMarkdown = False) -> None:
    """Repeat the ablations of the IK paper: number of draft tokens, training questions, and grader.

    A judge is fitted for every combination.

    Example: knowgate sweep ik --labels runs/train --tokens 0,8,32 --rows 1000,5000 --grades contains,judge --judge M
    """
    from knowgate.papers.ik_ablations import IkAblations, sweep_ik

    fit_options: dict[str, Any] = {"mode": options.mode, "base": options.base}
    if options.epochs is not None:
        fit_options["epochs"] = options.epochs
    ablations = IkAblations(
        tokens=parse_integers("--tokens", options.tokens),
        rows=[None if size == "all" else parse_integers("--rows", size)[0] for size in _split(options.rows)],
        graders=_split(options.grades),
        judge=load_model(options.judge) if options.judge else None,
        fit_options=fit_options,
        seed=options.seed,
    )
    with require_extra("fitting", "train"):
        table = sweep_ik(labels, ablations, test_runs=options.test, out=options.out, notify=inform)
    _print([table], markdown)


class DhiclSweepOptions(Options):
    """Options of `knowgate sweep dhicl`."""

    history: str = option("history.db", "History log of earlier questions, made by `knowgate history import`.")
    model: str | None = option(
        None, "LLM that makes missing decisions. Default: no LLM; only decisions that are stored in the runs are used."
    )
    gates: list[str] | None = option(None, "Gates to compare with DH-ICL in the first table, separated by commas.")
    k: Count = option(20, "Number of logged questions shown to the LLM. The table that compares `counts` ignores it.")
    counts: str = option(",".join(map(str, EXAMPLE_COUNTS)), "Values of `k` to compare, separated by commas.")
    words: str = option(",".join(LABEL_WORD_PAIRS), "Known/unknown word pairs, such as yes/no, separated by commas.")
    embedder: str | None = option(
        None, "Embedding model that finds similar logged questions. Default: the embedding model of the log."
    )
    learn_cut: int = option(0, "Number of logged questions to learn a threshold from. Needs `model`.", ge=0)


@app.command()
@expand_options
def dhicl(labels: LabelsOption, options: DhiclSweepOptions, markdown: AsMarkdown = False) -> None:
    """Build the tables of the DH-ICL paper on label runs.

    DH-ICL shows the LLM similar logged questions, labeled as known or unknown. Then it asks whether the LLM knows this
    one. The tables show accuracy and retrieval rate, compared with other gates. They also compare variants of DH-ICL:
    without calibration or without the log, with an empty log (cold start), and with other examples and label words.

    Example: knowgate sweep dhicl --labels runs/trivia --labels runs/web --history log.db --model smollm --gates my-uar
    """
    counts = parse_integers("--counts", options.counts)
    variants = DhiclVariants(options.history, options.k, counts, _split(options.words), options.embedder)
    model = load_model(options.model) if options.model else None
    other_gates = split_gate_specs(options.gates, labels) if options.gates else []
    tables = build_dhicl_tables(
        labels, variants, model=model, other_gates=other_gates, cut_questions=options.learn_cut, notify=inform
    )
    _print(tables, markdown)


class LatencyOptions(Options):
    """Options of `knowgate sweep latency`."""

    data: str = option(..., "Questions to decide on: jsonl:FILE, bench:NAME/SPLIT or hub:NAME?split=...")
    model: str = option("smollm", "LLM to use, such as smollm; see `knowgate models`.")
    limit: Count = option(50, "Use only the first N questions.")
    plug_in: bool = option(False, "Allow gates that were fitted on another LLM.", flag="--plug-in")


@app.command()
@expand_options
def latency(options: LatencyOptions, gates: GatesOption = None, markdown: AsMarkdown = False) -> None:
    """Measure how many seconds gates take to decide: median, 95th percentile and mean.

    Example: knowgate sweep latency --data bench:triviaqa/test --gates dhicl:log.db,my-uar,logprob:mean
    """
    if not gates:
        raise BadSetting("`sweep latency` measures how fast gates are, but got none. Example: --gates logprob:mean")
    questions = load_questions(options.data, options.limit)
    model = load_model(options.model)
    specs = split_gate_specs(gates)
    latencies = sweeps.time_gates(specs, questions, model, load_answer_prompts(), plug_in=options.plug_in)
    _print([sweeps.build_latency_table(latencies)], markdown)


def _split(text: str) -> list[str]:
    """Split a text at commas, without empty parts."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _print(tables: list[TextTable], markdown: bool) -> None:
    """Print tables, as Markdown or fitted to the terminal."""
    if markdown:
        create_console().print(render_markdown_tables(tables))
    else:
        print_tables(tables)


SELF_ASSESSMENT_COLUMNS = ("labels", "method", "accuracy", "says known", "says unknown", "AUROC")


class SelfAssessmentOptions(Options):
    """Options of `knowgate eval-self`."""

    model: str = option("smollm", "LLM that assesses itself, such as smollm.")
    words: str = option(
        "true/false", "Pairs of words with which the LLM says whether it knows the answer. Example: true/false,yes/no"
    )
    history: str | None = option(None, "Log of questions. Adds rows for methods that show the LLM similar ones.")
    k: Count = option(20, "Number of logged questions shown to the LLM. Used with `history`.")
    judge: str | None = option(
        None,
        "LLM that judges from a statement of the assessed LLM, in its own words, whether that LLM knows the answer. `self`: "
        "the assessed LLM judges its own statement. Adds a row to the table.",
    )
    gates: list[str] | None = option(None, "Gates to compare with the LLM's self-assessment, by name or folder.")
    plug_in: bool = option(False, "Allow gates that were fitted on another LLM.", flag="--plug-in")
    limit: Count | None = option(None, "Maximum number of questions per set.")


def eval_self(
    data: Annotated[
        list[str],
        typer.Option(help="Questions as jsonl:FILE, written by `label --kb-sat FILE`. May be repeated."),
    ],
    options: SelfAssessmentOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure whether the LLM can tell which questions it can answer (the KB-SAT test).

    Prints one row per method: the LLM is asked directly; it is asked with similar logged questions as examples
    (--history); it answers freely and a judge reads the answer (--judge); or a gate decides (--gates).
    """
    model = load_model(options.model)
    judge = _load_judge(options.judge, model)
    gates = split_gate_specs(options.gates) if options.gates else []
    for spec in data:
        questions = load_questions(spec, options.limit)
        assessor = SelfAssessor(model, questions, options.history, options.k, plug_in=options.plug_in, notify=inform)
        assessments = assessor.assess_all(options.words.split(","), judge, gates)
        if as_json:
            for assessment in assessments:
                print_json({"data": spec, "model": model.name, **asdict(assessment)})
        else:
            _print_assessments(spec, questions, assessments)


def _load_judge(spec: str | None, model: Model) -> Model | None:
    """Load the LLM that reads free self-assessments. 'self' means the assessed model, None no judge."""
    if spec == "self":
        return model
    return load_model(spec) if spec else None


def _print_assessments(spec: str, questions: Sequence[Question], assessments: Iterable[SelfAssessment]) -> None:
    """Print the results of all methods on a set of questions as a table."""
    n_known = sum(bool(question.meta.get("known")) for question in questions)
    title = f"{spec}: {n_known} known, {len(questions) - n_known} unknown"
    rows = tuple(_format_row(assessment) for assessment in assessments)
    if rows:
        print_tables([TextTable(title, SELF_ASSESSMENT_COLUMNS, rows)])


def _format_row(row: SelfAssessment) -> tuple[str, ...]:
    """Format one method's results as a row of the table."""
    unreadable = f" ({row.unreadable} unreadable)" if row.unreadable else ""
    auroc = "-" if row.auroc is None else f"{row.auroc:.3f}"
    counts = (str(row.predicted_known), str(row.predicted_unknown))
    return (row.words, row.method + unreadable, f"{row.accuracy:.1%}", *counts, auroc)
