"""`evaluate`: gates and label runs (or fresh questions) in, a comparison out. What `knowgate eval` calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from knowgate.core.validation import check_integer, check_seed
from knowgate.data.questions import QuestionSource
from knowgate.data.runs.folder import RunsLike, resolve_run_paths
from knowgate.data.runs.table import MAX_ROWS_IN_MEMORY, LabelTable, load_label_table
from knowgate.errors import BadSetting, MissingExtra
from knowgate.evaluation.gate_comparison import Evaluation, compare_gates, read_guarantees
from knowgate.evaluation.gate_results import build_baselines
from knowgate.evaluation.live_decisions import AUTO_GATES, decide_recorded_questions, label_and_decide
from knowgate.evaluation.post_retrieval import evaluate_cascade, evaluate_second_look, judge_trial_passages
from knowgate.evaluation.retrieval_actions import evaluate_actions
from knowgate.gates.arbiters.offline_arbitration import ArbiterChoices, arbitrate, get_arbiter_folder
from knowgate.gates.offline_scoring import TableScores, drop_seen_rows, save_scores, score_gates
from knowgate.labels.options import DEFAULT_CANDIDATES
from knowgate.labels.run import LabelProgress
from knowgate.models.prompts.answers import load_answer_prompts
from knowgate.stats.bootstrap import DEFAULT_RESAMPLES, Bootstrap
from knowgate.stats.metrics import BoolArray
from knowgate.types import Arbiter, Gate, Model, Reranker, Retriever, Runner

GateLike = str | Path | Gate
DEFAULT_MODEL = "smollm"  # answers questions where none is named


MAX_RESAMPLES = 1_000_000


def evaluate(
    gates: GateLike | Sequence[GateLike] = AUTO_GATES,
    runs: RunsLike | None = None,
    *,
    data: QuestionSource | None = None,
    model: str | Model | None = None,
    prompts: str | Path | None = None,
    index: str | Path | Retriever | None = None,
    rerank: str | Path | Reranker | None = None,
    candidates: int = DEFAULT_CANDIDATES,
    k: int | None = None,
    out: str | Path | None = None,
    limit: int | None = None,
    plug_in: bool = False,
    drop_seen: bool = False,
    second_look: str | Path | None = None,
    arbiter: str | Path | Arbiter | None = None,
    price_retrieval: float | None = None,
    price_wrong: float = 1.0,
    record: bool = False,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
    runner: str | Runner | None = None,
    on_progress: Callable[[LabelProgress], None] = lambda tally: None,
    on_weighed: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Compare gates on the same questions: accuracy, retrieval rate, ranking, calibration, cost, each with intervals.

    gates: specs ('logprob:mean'), folders of fitted gates, gates themselves, or 'auto' for all that the rows allow.
    A gate given as an object is evaluated as it is in memory, with the threshold it has there.
    runs: label runs; no LLM is run, unless `model` names theirs: then gates for which the rows are not enough ask it,
    and what they said is kept beside the rows. prompts: the wording of the answers, 'free' or a TOML file, where it is
    not the packaged one; with `runs` and `model`, that which the runs were made with.
    Or data: questions that `model` (the embedded one if none is named) answers now, with k passages from `index`,
    chosen from so many `candidates` by the reranker `rerank` where there is one; the answers are kept in the folder
    `out`, and the next call does not ask for them again. limit: only so many questions.
    plug_in: allow gates that were fitted on another LLM. drop_seen: leave out questions a gate was fitted on, instead
    of refusing it. second_look: a fitted kbm gate that judges the passages of every row; the evaluation then has a
    table of each gate with and without it, and the verdicts are kept beside the rows.
    arbiter: chooses after retrieval: a folder, 'rules', or one itself. The evaluation then has a table of each gate
    with it; what it believed is kept beside the rows, and its name alone will do where it is on record.
    on_weighed: is told how many of so many questions it has weighed.
    price_retrieval, price_wrong: of one search and of one wrong answer, in any currency; where rows have answers after
    several rounds of retrieval, the evaluation then has a table of skipping, one retrieval and several, chosen by
    expected gain.
    runner: where the LLM runs, 'local' or a Ray cluster as in `label`; model, index and gates by name.
    record: keep what all gates said beside the rows, for whoever has the rows alone. resamples, seed: of the bootstrap.

    Example:
        >>> evaluate(["my-gate", "logprob:mean"], "runs/test")  # doctest: +SKIP
    """
    llm = model or DEFAULT_MODEL
    asked: list[str | Gate] = [str(gate) if isinstance(gate, Path) else gate for gate in _several(gates)]
    _check(asked, runs, data, out)
    if rerank is not None and data is None:
        raise BadSetting("--rerank goes with --data; recorded rows keep the passages they were answered with.")
    check_integer(resamples, "the number of resamples", minimum=0, maximum=MAX_RESAMPLES)
    check_seed(seed)
    named: Sequence[str | Gate] = asked
    if data is not None and out is not None:
        made = label_and_decide(
            asked, data, model=llm, prompts=prompts, index=index, rerank=rerank, candidates=candidates, k=k, out=out,
            limit=limit, plug_in=plug_in, runner=runner, on_progress=on_progress,
        )  # fmt: skip
        runs, named = made.runs, made.gates
    elif model is not None:
        wording = load_answer_prompts(Path(prompts)) if prompts is not None else None
        named = decide_recorded_questions(
            asked, resolve_run_paths(runs or []), model=model, prompts=wording, plug_in=plug_in, runner=runner
        )
    try:
        trial = load_label_table(resolve_run_paths(runs or []), max_in_memory=MAX_ROWS_IN_MEMORY)
        looking = [] if second_look is None else [str(second_look)]
        weighing = str(arbiter) if isinstance(arbiter, Path) else arbiter
        trial = drop_seen_rows(trial, [*asked, *looking], get_arbiter_folder(weighing)) if drop_seen else trial
        scores = score_gates(trial, named, plug_in=plug_in)
        if record:
            save_scores(trial, scores)
        compared = compare_gates(trial, scores, resamples=resamples, seed=seed)
        choices = None if weighing is None else arbitrate(trial, weighing, plug_in=plug_in, watch=on_weighed)
        weighed = choices.fingerprint if choices else None
        compared = replace(compared, promises=read_guarantees(trial, asked, plug_in=plug_in, arbiter=weighed))
        compared = _with_arbiter(compared, scores, choices, seed) if choices else compared
        if price_retrieval is not None:
            given = choices.right if choices else trial.always_right
            compared = _with_actions(compared, scores, given, compute_search_price(price_retrieval, price_wrong), seed)
        return _with_second_look(compared, scores, looking[0], seed) if looking else compared
    except ModuleNotFoundError as error:
        raise MissingExtra("evaluating", "train") from error


def _with_second_look(compared: Evaluation, scored: Sequence[TableScores], folder: str, seed: int) -> Evaluation:
    trial, draws = compared.trial, Bootstrap(len(compared.trial.rows), compared.resamples, seed)
    lines = _beside(trial, scored, ("never", "always"))
    return replace(compared, second=evaluate_second_look(trial, lines, judge_trial_passages(trial, folder), draws))


def _with_arbiter(
    compared: Evaluation, scored: Sequence[TableScores], choices: ArbiterChoices, seed: int
) -> Evaluation:
    trial, draws = compared.trial, Bootstrap(len(compared.trial.rows), compared.resamples, seed)
    return replace(compared, cascade=evaluate_cascade(trial, _beside(trial, scored, ("always",)), choices, draws))


def compute_search_price(retrieval: float, wrong: float) -> float:
    """What a search costs in right answers."""
    for option, price in (("--price-retrieval", retrieval), ("--price-wrong", wrong)):
        if not (math.isfinite(price) and price >= 0):
            raise BadSetting(f"{option} is {price}; a price is a number, 0 or more.")
    if wrong == 0:
        raise BadSetting("--price-wrong is 0: where wrong answers cost nothing, no search is worth its price.")
    return retrieval / wrong


def _with_actions(
    compared: Evaluation, scored: Sequence[TableScores], given: BoolArray, price: float, seed: int
) -> Evaluation:
    gates = _beside(compared.trial, scored, ())
    return replace(compared, actions=evaluate_actions(compared.trial, gates, given, [price], compared.resamples, seed))


def _beside(trial: LabelTable, scored: Sequence[TableScores], names: Sequence[str]) -> list[TableScores]:
    """The gates, after those of the lines every table has that are named."""
    lines = [one for one in build_baselines(trial) if one.name in names]
    return [*lines, *(one for one in scored if one.name not in ("never", "always", "oracle"))]


def _several(gates: GateLike | Sequence[GateLike]) -> list[GateLike]:
    return list(gates) if isinstance(gates, list | tuple) else [gates]  # type: ignore[list-item]


def _check(gates: Sequence[object], runs: RunsLike | None, data: QuestionSource | None, out: str | Path | None) -> None:
    if (runs is None) == (data is None):
        raise BadSetting("give either --labels RUN (recorded rows) or --data SPEC (questions to answer now).")
    if data is not None and out is None:
        raise BadSetting("--data needs --out DIR: the answered questions are kept there and can be evaluated again.")
    if not gates:
        raise BadSetting("no gate is named; 'auto' stands for all that the rows allow. See: knowgate gates")
