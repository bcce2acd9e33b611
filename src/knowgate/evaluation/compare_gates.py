"""`evaluate`: gates and label runs (or fresh questions) in, a comparison out. What `knowgate eval` calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from knowgate.arbiters import ArbiterChoices, arbiter_folder, arbitrate
from knowgate.datasets import Data
from knowgate.doors import check_seed, check_whole
from knowgate.errors import BadSetting, MissingExtra
from knowgate.evaluation.actions import actions_of
from knowgate.evaluation.cascade import cascade_of
from knowgate.evaluation.comparison.evaluation import Evaluation, compare
from knowgate.evaluation.comparison.gate_results import baselines
from knowgate.evaluation.comparison.promised import read_promises
from knowgate.evaluation.live import AUTO, answer_now, ask_now
from knowgate.evaluation.second_look import look_again, second_lines
from knowgate.gates import GateScores, record_scores, score_gates, without_seen
from knowgate.labels import CANDIDATES, Tally
from knowgate.prompts import load_answer_prompts
from knowgate.runs import HELD, Runs, Trial, load_trial, run_paths
from knowgate.statistics import RESAMPLES, Bools, Draws
from knowgate.types import Arbiter, Gate, Model, Reranker, Retriever, Runner

GateLike = str | Path | Gate
MODEL = "smollm"  # answers questions where none is named


MOST_RESAMPLES = 1_000_000


def evaluate(
    gates: GateLike | Sequence[GateLike] = AUTO,
    runs: Runs | None = None,
    *,
    data: Data | None = None,
    model: str | Model | None = None,
    prompts: str | Path | None = None,
    index: str | Path | Retriever | None = None,
    rerank: str | Path | Reranker | None = None,
    candidates: int = CANDIDATES,
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
    resamples: int = RESAMPLES,
    seed: int = 0,
    runner: str | Runner | None = None,
    on_progress: Callable[[Tally], None] = lambda tally: None,
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
    llm = model or MODEL
    asked: list[str | Gate] = [str(gate) if isinstance(gate, Path) else gate for gate in _several(gates)]
    _check(asked, runs, data, out)
    if rerank is not None and data is None:
        raise BadSetting("--rerank goes with --data; recorded rows keep the passages they were answered with.")
    check_whole(resamples, "the number of resamples", least=0, most=MOST_RESAMPLES)
    check_seed(seed)
    named: Sequence[str | Gate] = asked
    if data is not None and out is not None:
        made = answer_now(
            asked, data, model=llm, prompts=prompts, index=index, rerank=rerank, candidates=candidates, k=k, out=out,
            limit=limit, plug_in=plug_in, runner=runner, on_progress=on_progress,
        )  # fmt: skip
        runs, named = made.runs, made.gates
    elif model is not None:
        wording = load_answer_prompts(Path(prompts)) if prompts is not None else None
        named = ask_now(asked, run_paths(runs or []), model=model, prompts=wording, plug_in=plug_in, runner=runner)
    try:
        trial = load_trial(run_paths(runs or []), held=HELD)
        looking = [] if second_look is None else [str(second_look)]
        weighing = str(arbiter) if isinstance(arbiter, Path) else arbiter
        trial = without_seen(trial, [*asked, *looking], arbiter_folder(weighing)) if drop_seen else trial
        scores = score_gates(trial, named, plug_in=plug_in)
        if record:
            record_scores(trial, scores)
        compared = compare(trial, scores, resamples=resamples, seed=seed)
        choices = None if weighing is None else arbitrate(trial, weighing, plug_in=plug_in, watch=on_weighed)
        weighed = choices.fingerprint if choices else None
        compared = replace(compared, promises=read_promises(trial, asked, plug_in=plug_in, arbiter=weighed))
        compared = _with_arbiter(compared, scores, choices, seed) if choices else compared
        if price_retrieval is not None:
            given = choices.right if choices else trial.always_right
            compared = _with_actions(compared, scores, given, search_price(price_retrieval, price_wrong), seed)
        return _with_second_look(compared, scores, looking[0], seed) if looking else compared
    except ModuleNotFoundError as error:
        raise MissingExtra("evaluating", "train") from error


def _with_second_look(compared: Evaluation, scored: Sequence[GateScores], folder: str, seed: int) -> Evaluation:
    trial, draws = compared.trial, Draws(len(compared.trial.rows), compared.resamples, seed)
    lines = _beside(trial, scored, ("never", "always"))
    return replace(compared, second=second_lines(trial, lines, look_again(trial, folder), draws))


def _with_arbiter(compared: Evaluation, scored: Sequence[GateScores], choices: ArbiterChoices, seed: int) -> Evaluation:
    trial, draws = compared.trial, Draws(len(compared.trial.rows), compared.resamples, seed)
    return replace(compared, cascade=cascade_of(trial, _beside(trial, scored, ("always",)), choices, draws))


def search_price(retrieval: float, wrong: float) -> float:
    """What a search costs in right answers."""
    for option, price in (("--price-retrieval", retrieval), ("--price-wrong", wrong)):
        if not (math.isfinite(price) and price >= 0):
            raise BadSetting(f"{option} is {price}; a price is a number, 0 or more.")
    if wrong == 0:
        raise BadSetting("--price-wrong is 0: where wrong answers cost nothing, no search is worth its price.")
    return retrieval / wrong


def _with_actions(
    compared: Evaluation, scored: Sequence[GateScores], given: Bools, price: float, seed: int
) -> Evaluation:
    gates = _beside(compared.trial, scored, ())
    return replace(compared, actions=actions_of(compared.trial, gates, given, [price], compared.resamples, seed))


def _beside(trial: Trial, scored: Sequence[GateScores], names: Sequence[str]) -> list[GateScores]:
    """The gates, after those of the lines every table has that are named."""
    lines = [one for one in baselines(trial) if one.name in names]
    return [*lines, *(one for one in scored if one.name not in ("never", "always", "oracle"))]


def _several(gates: GateLike | Sequence[GateLike]) -> list[GateLike]:
    return list(gates) if isinstance(gates, list | tuple) else [gates]  # type: ignore[list-item]


def _check(gates: Sequence[object], runs: Runs | None, data: Data | None, out: str | Path | None) -> None:
    if (runs is None) == (data is None):
        raise BadSetting("give either --labels RUN (recorded rows) or --data SPEC (questions to answer now).")
    if data is not None and out is None:
        raise BadSetting("--data needs --out DIR: the answered questions are kept there and can be evaluated again.")
    if not gates:
        raise BadSetting("no gate is named; 'auto' stands for all that the rows allow. See: knowgate gates")
