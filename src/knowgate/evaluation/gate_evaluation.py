"""Evaluation of gates on label runs, or on questions that the LLM answers now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from knowgate.core.options import Seed, option, with_options
from knowgate.core.validation import check_integer
from knowgate.data.questions import QuestionSource
from knowgate.data.runs.folder import RunsLike, resolve_run_paths
from knowgate.data.runs.records import TableScores
from knowgate.data.runs.table import MAX_ROWS_IN_MEMORY, LabelTable, load_label_table
from knowgate.errors import BadSetting, require_extra
from knowgate.evaluation.gate_comparison import Evaluation, compare_gates, read_guarantees
from knowgate.evaluation.gate_results import build_baselines
from knowgate.evaluation.live_decisions import (
    AUTO_GATES,
    LiveOptions,
    decide_on_runs,
    label_and_decide,
    make_record_names,
)
from knowgate.evaluation.post_retrieval import evaluate_cascade, evaluate_second_look, judge_passages
from knowgate.evaluation.recommendation import recommend
from knowgate.evaluation.replay import Price
from knowgate.evaluation.retrieval_actions import evaluate_actions
from knowgate.gates.arbiters import NO_ARBITER, get_policy_arbiter
from knowgate.gates.arbiters.offline_arbitration import ArbiterChoices, arbitrate, get_arbiter_folder
from knowgate.gates.fitted_gate import get_gate_name, has_judge
from knowgate.gates.offline_scoring import drop_seen_rows, save_scores, score_gates
from knowgate.labels.run import LabelProgress
from knowgate.stats.bootstrap import DEFAULT_RESAMPLES, Bootstrap
from knowgate.training.topics import TOPICS_HELP, measure_topics
from knowgate.types import Gate

GateLike = str | Path | Gate
DEFAULT_MODEL = "smollm"
MAX_RESAMPLES = 1_000_000


class EvaluateOptions(LiveOptions):
    """Options of `evaluate`."""

    out: Path | None = option(
        None, "Folder for report.html, summary.json, table.md, and answers to the questions in `data`.", metavar="DIR"
    )
    drop_seen: bool = option(
        False, "Leave out questions that a gate was fitted on. Default: such questions are an error."
    )
    grader: str | None = option(
        None,
        "Grader whose grades count, if a row was graded by several: `recorded` (imported grades), `exact`, `contains` or "
        "`judge`. Default: the one that the rows were labeled with.",
        metavar="NAME",
    )
    topics: str | None = option(None, TOPICS_HELP, metavar="auto|N|KEY")
    second_look: str | Path | None = option(
        None,
        "Folder of a fitted kbm gate, which drops retrieved passages that it expects to do more harm than good. "
        "`DIR,verdict=own` drops passages that the gate judges insufficient, as in the KBM paper. Adds a table of the "
        "results with and without dropping passages.",
        metavar="DIR",
    )
    arbiter: Any = option(
        None,
        "Arbiter that chooses between the answers with and without passages. Adds a table of the results with and "
        "without it. Its choices are stored in the runs.",
        metavar="DIR|rules",
    )
    renamed: ClassVar[Mapping[str, str]] = {"price_retrieval": "price_search"}
    price_search: Price | None = option(
        None,
        "Price of one search. Adds a table in which each question gets the best of three actions: skip, retrieve "
        "once, or several times. Needs runs labeled with `iterative`.",
        flag=None,
    )
    price_wrong: float = option(
        1.0,
        "Price of a wrong answer, in the same currency as the price of a search. Adds a table in which each question gets "
        "the best of three actions: skip, retrieve once, or several times. Needs runs labeled with `iterative`.",
        gt=0,
        allow_inf_nan=False,
    )
    record: bool = option(False, "Whether to store the gates' decisions in the label runs.")
    resamples: int = option(DEFAULT_RESAMPLES, "Number of bootstrap resamples for the intervals.", ge=0)
    seed: Seed = option(0, "Random seed of the resamples.")


@with_options(EvaluateOptions)
def evaluate(
    gates: GateLike | Sequence[GateLike] = AUTO_GATES,
    runs: RunsLike | None = None,
    *,
    data: QuestionSource | None = None,
    options: EvaluateOptions,
    on_progress: Callable[[LabelProgress], None] = lambda progress: None,
    on_arbitrated: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Compare gates on the same questions: accuracy, searches, ranking and cost.

    Give either label runs (`runs`) or questions (`data`). With `runs`, no LLM is called by default. With `data`, the
    LLM answers now, and the answers are stored in `out`.

    Args:
        gates: Gate specs such as 'logprob:mean', folders of fitted gates, gate objects, or 'auto' for all gates that the
            label runs allow. A gate object is evaluated with the threshold it has in memory.
        runs: Label runs: folders, or what `label` returned.
        data: Questions to answer now: data specs separated by commas, or a list of questions.
        options: Options as one object. Each option can also be given as a keyword.
        on_progress: Called with the progress of labeling.
        on_arbitrated: Called with how many questions the arbiter (which chooses between the answers with and without
            passages) has decided, and how many there are.

    Returns:
        The evaluation. It shows its tables in a notebook; `write_report` writes it to files.

    Raises:
        BadSetting: An option is invalid or contradicts another.
        BadInput: The runs have no graded rows.

    Example:
        >>> evaluate(["my-gate", "logprob:mean"], "runs/test")  # doctest: +SKIP
    """
    gate_list: Sequence[Any] = gates if isinstance(gates, list | tuple) else [gates]
    given_gates: list[str | Gate] = [str(gate) if isinstance(gate, Path) else gate for gate in gate_list]
    _check_source(given_gates, runs, data, options)
    scored_gates: Sequence[str | Gate] = given_gates  # a gate that decides now is replaced by its stored decisions
    if data is not None and options.out is not None:
        live_options = options.replace(model=options.model or DEFAULT_MODEL)
        runs = label_and_decide(given_gates, data, options.out, live_options, on_progress)
        scored_gates = make_record_names(given_gates)
    elif options.model is not None:
        scored_gates = decide_on_runs(given_gates, resolve_run_paths(runs or []), options=options)
    with require_extra("evaluating", "train"):
        return _evaluate_runs(given_gates, scored_gates, resolve_run_paths(runs or []), options, on_arbitrated)


def _check_source(
    gates: Sequence[object], runs: RunsLike | None, data: QuestionSource | None, options: EvaluateOptions
) -> None:
    """Raise BadSetting if gates, label runs, questions and options do not go together."""
    check_integer(options.resamples, "the number of resamples", minimum=0, maximum=MAX_RESAMPLES)
    if (runs is None) == (data is None):
        raise BadSetting("give either `runs` or `data`. Set `runs` to recorded answers, or `data` to questions.")
    if data is not None and options.out is None:
        raise BadSetting("the answers to `data` need a folder. Set `out` to the folder.")
    if data is None and options.rerank is not None:
        raise BadSetting(
            "`rerank` cannot be used with `runs`, whose answers are already recorded. Set `data` to the questions, or leave "
            "`rerank` out."
        )
    if not gates:
        raise BadSetting(
            "no gate is given. A gate decides when to search. To evaluate all, set gates='auto'. To list them: knowgate gates"
        )


def _evaluate_runs(
    given_gates: Sequence[str | Gate],
    scored_gates: Sequence[str | Gate],
    runs: Sequence[Path],
    options: EvaluateOptions,
    on_arbitrated: Callable[[int, int], None],
) -> Evaluation:
    """Evaluate gates on label runs, which are folders of recorded answers. Then add the optional tables.

    Args:
        given_gates: The gates as the caller gave them.
        scored_gates: The same gates, for scoring. A gate that the caller ran on the LLM is replaced by the name of its
            decisions, which are stored in the runs.
        runs: Folders of the label runs.
        options: The options of `evaluate`.
        on_arbitrated: Called with how many questions the arbiter has decided, and how many there are.
    """
    arbiter = _choose_arbiter(given_gates, options)
    table = _load_table(given_gates, runs, arbiter, options)
    scores = score_gates(table, scored_gates, plug_in=options.plug_in)
    if options.record:
        save_scores(table, scores)
    evaluation = compare_gates(table, scores, resamples=options.resamples, seed=options.seed)
    choices = None
    if arbiter is not None:
        choices = arbitrate(table, arbiter, plug_in=options.plug_in, on_progress=on_arbitrated)
    evaluation = _add_gate_facts(evaluation, given_gates, choices, plug_in=options.plug_in)
    evaluation = _add_optional_tables(evaluation, scores, choices, options)
    return evaluation if options.topics is None else _add_topics(evaluation, options.topics)


def _choose_arbiter(gates: Sequence[str | Gate], options: EvaluateOptions) -> Any:
    """Return the arbiter of the options or, without one, the arbiter stored with one of the gates, if any.

    Raises:
        BadSetting: Several gates have different arbiters.
    """
    if options.arbiter is not None:
        return str(options.arbiter) if isinstance(options.arbiter, Path) else options.arbiter
    arbiters = {get_policy_arbiter(gate) for gate in gates} - {None, NO_ARBITER}
    if len(arbiters) > 1:
        raise BadSetting("the gates were saved with different arbiters. Evaluate one gate at a time, or set `arbiter`.")
    return next(iter(arbiters), None)


def _load_table(
    gates: Sequence[str | Gate], runs: Sequence[Path], arbiter: Any, options: EvaluateOptions
) -> LabelTable:
    """Load label runs. The option `drop_seen` leaves out the questions that a gate, judge or arbiter was fitted on."""
    table = load_label_table(runs, max_in_memory=MAX_ROWS_IN_MEMORY, grader=options.grader)
    if not options.drop_seen:
        return table
    judges = [str(options.second_look)] if options.second_look else []  # the judge that drops useless passages
    return drop_seen_rows(table, [*gates, *judges], get_arbiter_folder(arbiter))


def _add_gate_facts(
    evaluation: Evaluation, gates: Sequence[str | Gate], choices: ArbiterChoices | None, *, plug_in: bool
) -> Evaluation:
    """Add the guarantees of the gates, and which gates and arbiters run a fine-tuned judge."""
    fingerprint = choices.fingerprint if choices else None
    candidates = [*gates, *(result.gate for result in evaluation.gates)]
    if choices:
        candidates.append(choices.name)
    return replace(
        evaluation,
        guarantees=read_guarantees(evaluation.table, gates, plug_in=plug_in, arbiter=fingerprint),
        with_judge=frozenset(get_gate_name(candidate) for candidate in candidates if has_judge(candidate)),
    )


def _add_optional_tables(
    evaluation: Evaluation, scores: Sequence[TableScores], choices: ArbiterChoices | None, options: EvaluateOptions
) -> Evaluation:
    """Add the results that the options ask for: with an arbiter, with a price of searches, with a judge of passages.

    Args:
        evaluation: The evaluation, whose results are added to a copy.
        scores: For each gate, the need for retrieval that it gives to each question.
        choices: Which of both answers the arbiter chooses for each question; None without an arbiter.
        options: The options of `evaluate`.
    """
    table = evaluation.table
    bootstrap = Bootstrap(len(table.rows), options.resamples, options.seed)
    if choices:
        gates = _add_baselines(table, scores, ["always"])
        cascade = evaluate_cascade(table, gates, choices, bootstrap)
        # Without the option, the arbiter comes from the folder of a policy.
        evaluation = replace(evaluation, cascade=replace(cascade, is_policy=options.arbiter is None))
    if options.price_search is not None:
        gates = _add_baselines(table, scores, [])
        once_right = choices.right if choices else table.retrieved_right  # whether the answer after one search is right
        price = options.price_search / options.price_wrong  # in right answers
        evaluation = replace(evaluation, actions=evaluate_actions(table, gates, once_right, price, bootstrap))
    if options.second_look is not None:
        gates = _add_baselines(table, scores, ["never", "always"])
        useful = judge_passages(table, str(options.second_look))
        evaluation = replace(evaluation, second_looks=evaluate_second_look(table, gates, useful, bootstrap))
    return evaluation


def _add_topics(evaluation: Evaluation, topics: str) -> Evaluation:
    """Add measures per topic of the questions. Searches are counted if a gate is recommended."""
    recommendation = recommend(evaluation)
    retrieve = ~recommendation.skips if recommendation.is_positive else None
    results = measure_topics(evaluation.table, topics, retrieve=retrieve, resamples=evaluation.resamples)
    return replace(evaluation, topics=results)


def _add_baselines(table: LabelTable, scores: Sequence[TableScores], names: Sequence[str]) -> list[TableScores]:
    """Return the baselines with the given names ('never', 'always' or 'oracle'), followed by the gates."""
    baselines = {baseline.gate: baseline for baseline in build_baselines(table)}
    selected = [baseline for name, baseline in baselines.items() if name in names]
    # A baseline that was also given as a gate would be shown twice.
    return [*selected, *(gate_scores for gate_scores in scores if gate_scores.gate not in baselines)]
