"""Choose policies on train rows and evaluate them on test rows, as `policy_protocol.md` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from benchmarks.policy_fits import COMMAND_CHOICES, FittedRows, list_fitted, load_fitted
from benchmarks.policy_fits import TITLES as FITTED_TITLES
from benchmarks.policy_predictions import (
    ANSWER,
    CLOSED,
    MEMBERS,
    MIXED,
    MIXED_SETS,
    POOLED,
    QUESTION,
    RECORDED_ARBITER,
    Predictions,
    fit_calibration,
    has_pooled,
    list_trained_sets,
    load_predictions,
    make_arbiters,
    make_gates,
)
from benchmarks.policy_sets import RECORDED_SETS
from benchmarks.tables.common import resample_auroc
from knowgate.gates.calibration.threshold_choice import list_rate_thresholds
from knowgate.stats.metrics import auroc
from knowgate.training.policy.choice import PolicyChoice, apply_policy, choose_policy
from knowgate.training.policy.outcomes import ALWAYS, CONSTANT_GATES, NEVER, PolicyResult

RESAMPLES = 10_000
TARGET_RATES = {"llama3_8b": (0.84, 0.60), "gpt4_nq": (0.10,), "chatgpt_nq": (0.85,), "davinci3_nq": (0.85,)}
RANDOM_RESAMPLES = 2_000
RATE_MARGIN = 0.01  # a policy for a target share of searches is chosen for this much less
NEWS = "gpt3_realtimeqa"
RULES = "rules"
LLAMA4 = "llama4_realtimeqa"
LLAMA3 = "llama3_8b"
FIRST_THRESHOLD = (
    0.53224  # of the policy that was chosen for Llama-3.1-8B before losses were counted against an arbiter
)
Json = dict[str, Any]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Setting:
    """A policy with the name that tables show.

    Attributes:
        title: The name.
        chosen_for: The recorded set that it was chosen and calibrated on.
        policy: Gate, arbiter and threshold.
        judge: The adapters behind it: POOLED, or empty for those of `chosen_for`.
    """

    title: str
    chosen_for: str
    policy: PolicyResult
    judge: str = ""


@cache
def choose(name: str, judge: str = "", *, with_recorded_arbiter: bool = False) -> PolicyChoice:
    """Choose the policy of a recorded set on its train rows; the arbiter on record is not held out, so it is optional."""
    train, calibration = load_predictions(name, judge).train, fit_calibration(name, judge)
    arbiters = [
        arbiter
        for arbiter in make_arbiters(train, calibration)
        if with_recorded_arbiter or arbiter.name != RECORDED_ARBITER
    ]
    gates = make_gates(train, calibration)
    return choose_policy(gates, train.closed, train.open, arbiters, folds=train.folds)


def choose_judge(name: str) -> str:
    """Return the adapters whose policy is worth more on train rows, cross-validated: POOLED, or empty for the set's own."""
    if not has_pooled():
        return ""
    own, pooled = (choose(name, judge).estimate.value for judge in ("", POOLED))
    return POOLED if pooled > own else ""


def choose_for_rate(name: str, rate: float, judge: str = "") -> PolicyResult:
    """Return the policy with the most right answers on train rows among those with few enough searches."""
    train, calibration = load_predictions(name, judge).train, fit_calibration(name, judge)
    arbiters = {arbiter.name: arbiter.prefers_closed_book for arbiter in make_arbiters(train, calibration)}
    arbiters = {"": None, **arbiters}
    results = []
    for gate in make_gates(train, calibration):
        limit = float(np.quantile(gate.needs, 1 - rate + RATE_MARGIN))
        for threshold in (limit, *(value for value in list_rate_thresholds(gate.needs) if value > limit)):
            for arbiter, prefers_closed_book in arbiters.items():
                setting = make_setting(gate.name, arbiter, threshold)
                rows = (gate.needs, train.closed, train.open, prefers_closed_book)
                results.append(apply_policy(setting, *rows, reads_draft=gate.reads_draft))
    return max(results, key=lambda result: (result.right, -result.searches))


def make_setting(gate: str, arbiter: str, threshold: float) -> PolicyResult:
    """Make a policy that was not evaluated yet."""
    chosen = choose("gpt4_nq").always
    return PolicyResult(gate, arbiter, threshold, 0.0, 0.0, 0.0, chosen.loss, chosen.loss, 0.0)


def right_answers(rows: Predictions, setting: Setting) -> tuple[Array, Array]:
    """Return which rows a policy retrieves for, and which it answers right."""
    retrieved, after_search = apply_setting(rows, setting)
    return retrieved, np.where(retrieved, after_search, rows.closed)


def apply_setting(rows: Predictions, setting: Setting) -> tuple[Array, Array]:
    """Return which rows a policy retrieves for, and which it answers right after a search."""
    calibration, policy = fit_calibration(setting.chosen_for, setting.judge), setting.policy
    if policy.gate in CONSTANT_GATES:
        retrieved = np.full(len(rows.closed), policy.gate == ALWAYS)
    else:
        needs = {gate.name: gate.needs for gate in make_gates(rows, calibration)}[policy.gate]
        retrieved = needs > policy.threshold
    if not policy.arbiter:
        return retrieved, rows.open
    arbiters = {arbiter.name: arbiter for arbiter in make_arbiters(rows, calibration)}
    return retrieved, np.where(arbiters[policy.arbiter].prefers_closed_book, rows.closed, rows.open)


def compare(right: Array, other: Array, comparisons: int = 1) -> Json:
    """Return the difference of two shares of right answers with its interval, by a paired bootstrap."""
    difference = right.astype(int) - other.astype(int)
    n = len(difference)
    shares = [float((difference == value).mean()) for value in (-1, 0, 1)]
    counts = np.random.default_rng(0).multinomial(n, shares, RESAMPLES)
    means = (counts[:, 2] - counts[:, 0]) / n
    low, high = np.quantile(means, [0.025, 0.975])
    share = min((means <= 0).mean(), (means >= 0).mean())
    p_value = float(min(1.0, 2 * max(share, 1 / RESAMPLES)))  # a bootstrap cannot show a p value of zero
    return {
        "value": round(float(difference.mean()), 5),
        "low": round(float(low), 5),
        "high": round(float(high), 5),
        "excludes_zero_corrected": is_significant(p_value, comparisons),
        "p": round(p_value, 5),
    }


def is_significant(p_value: float, comparisons: int) -> bool:
    """Return whether a bootstrap p value is below .05 after Bonferroni's correction for a number of comparisons."""
    return p_value < 0.05 / comparisons


def compare_with_random(closed: Array, retrieved: Array, after_search: Array) -> tuple[float, Json]:
    """Return the right answers of retrieving at random as often with the same arbiter, and the policy's gain over it."""
    right = np.where(retrieved, after_search, closed)
    expected = closed + retrieved.mean() * (after_search.astype(float) - closed)
    low, high = np.quantile(count_draws(len(right)) @ (right - expected) / len(right), [0.025, 0.975])
    gain = {"value": float((right - expected).mean()), "low": float(low), "high": float(high)}
    return float(expected.mean()), {name: round(value, 5) for name, value in gain.items()}


@lru_cache(maxsize=1)
def count_draws(n: int) -> Array:
    """Return how often each of n rows is in each bootstrap resample (resamples x rows)."""
    draws = np.random.default_rng(0).integers(0, n, (RANDOM_RESAMPLES, n))
    return np.array([np.bincount(draw, minlength=n) for draw in draws], dtype=float)


def describe(rows: Predictions, setting: Setting) -> Json:
    """Evaluate a policy on test rows."""
    policy = setting.policy
    has_adapters = policy.gate not in CONSTANT_GATES or policy.arbiter == "adapter"
    models = MEMBERS * (has_adapters + (policy.arbiter == RECORDED_ARBITER))
    reads_draft = policy.gate.startswith("judge") or bool(policy.arbiter)
    outcome = describe_outcome(rows, *apply_setting(rows, setting), reads_draft=reads_draft)
    threshold = round(float(np.clip(policy.threshold, -1, 2)), 5)
    facts = {"policy": setting.title, "gate": policy.gate, "arbiter": policy.arbiter or "none", "threshold": threshold}
    return {**facts, **outcome, "models": models}


def describe_outcome(
    rows: Predictions | FittedRows, retrieved: Array, after_search: Array, *, reads_draft: bool
) -> Json:
    """Describe what a policy does to test rows.

    Args:
        rows: The rows with their grades.
        retrieved: Whether the policy retrieves for each row.
        after_search: Whether it answers the row right after a search.
        reads_draft: Whether gate or arbiter read a draft, which costs a second LLM call for rows that are retrieved for.
    """
    right = np.where(retrieved, after_search, rows.closed)
    random, against_random = compare_with_random(rows.closed, retrieved, after_search)
    return {
        "searches": round(float(retrieved.mean()), 5),
        "right": round(float(right.mean()), 5),
        "random": round(random, 5),
        "against_always": compare(right, rows.open, count_headline_comparisons()),
        "against_never": compare(right, rows.closed, count_headline_comparisons()),
        "against_random": against_random,
        "llm_calls": round(1 + float(retrieved.mean()) * reads_draft, 5),
    }


@cache
def count_headline_comparisons() -> int:
    """Count the comparisons of the headline table: with always and with never, without always against itself."""
    by_benchmark = [name for name in (*list_trained_sets(), MIXED) if name not in COMMAND_CHOICES]
    by_benchmark.append(NEWS)  # Llama-4 has the benchmark's policy for news
    names = [choose(name, choose_judge(name)).chosen.name for name in by_benchmark]
    records = [*list_fitted(), *filter(None, COMMAND_CHOICES.values())]
    names += [ALWAYS for record in COMMAND_CHOICES.values() if not record]
    names += [f"{facts['gate']}{facts['arbiter']}" for facts in (load_fitted(record).facts for record in records)]
    return sum(1 if name == ALWAYS else 2 for name in names)


def evaluate_fitted(name: str) -> Json:
    """Evaluate a policy that `knowgate fit` wrote: the chosen one first, then always with the rules arbiter."""
    policy, always_rules = describe_fitted(name)
    return {**describe_rows(load_fitted(name), FITTED_TITLES[name]), "policy": policy, "others": [always_rules]}


def describe_fitted(name: str) -> tuple[Json, Json]:
    """Evaluate the policy of a record on its test rows, and always with the rules arbiter."""
    rows = load_fitted(name)
    facts, is_always = rows.facts, np.ones(len(rows.closed), dtype=bool)
    chosen, rules = (np.where(taken, rows.closed, rows.open) for taken in (rows.chosen, rows.rules))
    after_search = chosen if facts["arbiter"] else rows.open
    reads_draft = facts["reads_draft"] or bool(facts["arbiter"])
    first = describe_outcome(rows, rows.needs > facts["threshold"], after_search, reads_draft=reads_draft)
    names = {"policy": "chosen", "gate": facts["gate"], "arbiter": facts["arbiter"] or "none"}
    second = describe_outcome(rows, is_always, rules, reads_draft=True)
    always_rules = {"policy": "always, rules arbiter", "gate": ALWAYS, "arbiter": RULES, "threshold": -1.0}
    policy = {**names, "threshold": facts["threshold"], **first, "models": facts["models"]}
    return policy, {**always_rules, **second, "models": 0}


def compare_with_rules(record: str) -> Json:
    """Compare the policy of a record with always retrieving and the rules arbiter."""
    rows = load_fitted(record)
    chosen, rules = (np.where(taken, rows.closed, rows.open) for taken in (rows.chosen, rows.rules))
    return compare(np.where(rows.needs > rows.facts["threshold"], chosen, rows.closed), rules)


def describe_data_sets(record: str) -> list[Json]:
    """Evaluate the policy of a record on the test rows of each data set."""
    rows = load_fitted(record)
    retrieved = rows.needs > rows.facts["threshold"]
    after_search = np.where(rows.chosen, rows.closed, rows.open) if rows.facts["arbiter"] else rows.open
    results = []
    for name in dict.fromkeys(rows.sets):
        member = rows.sets == name
        part = replace(rows, closed=rows.closed[member], open=rows.open[member])
        outcome = describe_outcome(part, retrieved[member], after_search[member], reads_draft=rows.facts["reads_draft"])
        results.append({**describe_rows(part, str(name)), **outcome})
    return results


def put_command_first(name: str, result: Json) -> Json:
    """Make what `knowgate fit` chose the policy of a recorded LLM; the benchmark's own choice becomes one of the others."""
    record, own = COMMAND_CHOICES[name], {**result["policy"], "policy": "chosen on all train rows"}
    if record:
        return {**result, "policy": describe_fitted(record)[0], "others": [own, *result["others"]]}
    setting = Setting("chosen", name, make_setting(ALWAYS, "", choose(name).always.threshold))
    others = result["others"] if own["gate"] == ALWAYS else [own, *result["others"]]
    return {**result, "policy": describe(load_predictions(name).test, setting), "others": others}


def list_settings(name: str) -> list[Setting]:
    """List the policies of the protocol for a recorded set with train rows; the chosen one first."""
    always_arbiter = make_setting(ALWAYS, "adapter", choose(name).always.threshold)
    settings = [
        Setting("chosen", name, choose(name).chosen),
        Setting("always, rules arbiter", name, replace(always_arbiter, arbiter=RULES)),
        Setting("always, trained arbiter", name, always_arbiter),
    ]
    if load_predictions(name).arbiter.any():
        settings.insert(1, make_first_choice("chosen by the first rule"))
        chosen = choose(name, with_recorded_arbiter=True).chosen
        settings.append(Setting("chosen, if the arbiter on record is a candidate", name, chosen))
        recorded = replace(always_arbiter, arbiter=RECORDED_ARBITER)
        if chosen.name != recorded.name:
            settings.append(Setting("always, arbiter on record", name, recorded))
    for rate in TARGET_RATES.get(name, ()):
        settings.append(Setting(f"at most {rate:.0%} of the searches", name, choose_for_rate(name, rate)))
    return settings


def describe_pooled(name: str) -> list[Json]:
    """Evaluate the policies of the pooled adapters on test rows: the chosen one, and those for the target shares."""
    if not has_pooled():
        return []
    rows = load_predictions(name, POOLED).test
    policies = {"chosen with pooled adapters": choose(name, POOLED).chosen}
    for rate in TARGET_RATES.get(name, ()):
        policies[f"at most {rate:.0%} of the searches, pooled adapters"] = choose_for_rate(name, rate, POOLED)
    return [describe(rows, Setting(title, name, policy, POOLED)) for title, policy in policies.items()]


def add_pooled(name: str, result: Json) -> Json:
    """Add the policies of the pooled adapters; the chosen one becomes the headline if it is worth more on train rows."""
    pooled = describe_pooled(name)
    if not choose_judge(name):
        return {**result, "others": [*result["others"], *pooled]}
    own = {**result["policy"], "policy": "chosen with the LLM's own adapters"}
    return {**result, "policy": pooled[0], "others": [own, *result["others"], *pooled[1:]]}


def compare_auroc() -> dict[str, Json]:
    """Compare how well the pooled and the LLM's own adapters rank what is known, on test rows with 95 % intervals."""
    results = {}
    for name in list_trained_sets() if has_pooled() else ():
        own, pooled = load_predictions(name).test, load_predictions(name, POOLED).test
        for title, read in (("question", QUESTION), ("answer", ANSWER)):
            logits = [rows.logits[:, read, CLOSED] for rows in (own, pooled)]
            draws = np.random.default_rng(0).integers(0, len(own.closed), (RANDOM_RESAMPLES, len(own.closed)))
            resampled = [resample_auroc(own.closed, side, draws) for side in logits]
            low, high = np.quantile(resampled[1] - resampled[0], [0.025, 0.975])
            values = [auroc(own.closed, side) or 0.5 for side in logits]
            gain = {"value": values[1] - values[0], "low": float(low), "high": float(high)}
            results[f"{name}, {title}"] = {"own": values[0], "pooled": values[1], "gain": gain}
    return results


def make_first_choice(title: str) -> Setting:
    """Make the policy that was chosen for Llama-3.1-8B before the rule was changed."""
    return Setting(title, LLAMA3, make_setting("judge, gain", RULES, FIRST_THRESHOLD))


def evaluate(rows: Predictions, settings: Sequence[Setting], llm: str) -> Json:
    """Evaluate policies on test rows; the first is the headline."""
    results = [describe(rows, setting) for setting in settings]
    return {**describe_rows(rows, llm), "policy": results[0], "others": results[1:]}


def describe_rows(rows: Predictions | FittedRows, llm: str) -> Json:
    """Describe test rows: right answers without retrieval, with retrieval, and the better of both."""
    return {
        "llm": llm,
        "n": len(rows.closed),
        "never": round(float(rows.closed.mean()), 5),
        "always": round(float(rows.open.mean()), 5),
        "oracle": round(float((rows.closed | rows.open).mean()), 5),
    }


@cache
def evaluate_all() -> Json:
    """Evaluate every recorded LLM and mixed traffic."""
    results = {
        name: evaluate(load_predictions(name).test, list_settings(name), RECORDED_SETS[name].llm)
        for name in list_trained_sets()
    }
    results = {name: add_pooled(name, result) for name, result in results.items()}
    results |= {name: put_command_first(name, results[name]) for name in COMMAND_CHOICES if name in results}
    unfitted = Setting("chosen for text-davinci-003, without news", "davinci3_nq", choose("davinci3_nq").chosen)
    results[NEWS]["others"].append(describe(load_predictions(NEWS, "davinci3_nq").test, unfitted))
    results[LLAMA4] = evaluate_llama4()
    mixed = evaluate(load_predictions(MIXED).test, list_settings(MIXED), "text-davinci-003 and GPT-3")
    results[MIXED] = {**put_command_first(MIXED, add_pooled(MIXED, mixed)), "parts": describe_parts()}
    return {**results, **{name: evaluate_fitted(name) for name in list_fitted()}}


def evaluate_llama4() -> Json:
    """Evaluate Llama-4, which has no train rows, with the policies of the other LLMs; that of the other news set first."""
    sources = [NEWS, *(name for name in (*list_trained_sets(), MIXED) if name != NEWS)]
    settings = [Setting(f"chosen for {name}", name, choose(name).chosen) for name in sources]
    settings.append(make_first_choice(f"chosen for {LLAMA3} by the first rule"))
    settings.append(Setting("always, rules arbiter", NEWS, make_setting(ALWAYS, RULES, choose(NEWS).always.threshold)))
    if has_pooled():
        settings.append(Setting(f"chosen for {NEWS} with pooled adapters", NEWS, choose(NEWS, POOLED).chosen, POOLED))
        if choose_judge(NEWS):
            settings.insert(0, settings.pop())
    judges = [setting.judge or setting.chosen_for for setting in settings]
    tested = [load_predictions(LLAMA4, judge).test for judge in judges]
    results = [describe(rows, setting) for rows, setting in zip(tested, settings, strict=True)]
    return {**describe_rows(tested[0], RECORDED_SETS[LLAMA4].llm), "policy": results[0], "others": results[1:]}


def describe_parts() -> Json:
    """Describe mixed traffic by part: searches, right answers, and AUROC of known beside the fit on that part alone."""
    rows, judge = load_predictions(MIXED).test, choose_judge(MIXED)
    setting = Setting("chosen", MIXED, choose(MIXED, judge).chosen, judge)
    decided = load_predictions(MIXED, judge).test
    retrieved, right = right_answers(decided, setting)
    parts = {}
    for name in MIXED_SETS:
        member, alone = rows.sets == name, load_predictions(name).test
        own_retrieved, _ = right_answers(alone, Setting("chosen", name, choose(name).chosen))
        parts[name] = {
            "searches": round(float(retrieved[member].mean()), 5),
            "searches_alone": round(float(own_retrieved.mean()), 5),
            "right": round(float(right[member].mean()), 5),
            "always": round(float(rows.open[member].mean()), 5),
            "never": round(float(rows.closed[member].mean()), 5),
        }
        for title, read in (("question", QUESTION), ("answer", ANSWER)):
            mixed = auroc(rows.closed[member], rows.logits[member][:, read, CLOSED])
            own = auroc(alone.closed, alone.logits[:, read, CLOSED])
            parts[name][f"auroc_{title}"] = [round(mixed or 0, 4), round(own or 0, 4)]
    return parts


def list_train_choices() -> list[str]:
    """Describe the choice of each recorded set on its train rows; looks at no test row."""
    lines = []
    judges = ("", POOLED) if has_pooled() else ("",)
    for name, judge in ((name, judge) for name in (*list_trained_sets(), MIXED) for judge in judges):
        choice = choose(name, judge)
        chosen, estimate = choice.chosen, choice.estimate
        lines.append(
            f"{name}{judge and ', pooled'}: {chosen.name}, searches {chosen.searches:.1%}, right {chosen.right:.2%} "
            f"(always {choice.always.right:.2%}, never {choice.never.right:.2%}; out of fold {estimate.right:.2%} at "
            f"{estimate.searches:.1%}, worth {estimate.value:.4f}). {choice.reason}"
        )
        lines += [f"   {each.name}: {each.right:.2%} at {each.searches:.1%}" for each in choice.tried[:6]]
        for rate in TARGET_RATES.get(name, ()):
            result = choose_for_rate(name, rate, judge)
            lines.append(f"   at most {rate:.0%}: {result.name} {result.right:.2%} at {result.searches:.1%}")
    return lines


__all__ = ["NEVER", "choose", "evaluate_all", "list_train_choices"]
