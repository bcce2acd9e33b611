"""One training of `benchmarks/judge_train.py`: lessons, training, scores of the rows left out and of the test rows."""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.judge_recipes import FOLDS, KINDS, LABELS, Case, Recipe, load_cases, mean_scores, own_cases, recipes
from knowgate.core.files import write_json
from knowgate.data.signals.vectors import text_features
from knowgate.gates.judges import ANSWER_LABELS
from knowgate.gates.judges.causal_judge import CausalJudge, load_judge_base
from knowgate.gates.judges.encoder_judge import PairEncoder, resolve_encoder
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.retrieval.embeddings import SentenceEmbedder
from knowgate.training.judges.answer_judge import make_answer_training
from knowgate.training.judges.ensemble import assign_folds
from knowgate.training.judges.trainable_models import TrainableCausalModel, TrainableEncoder, TrainingExample
from knowgate.training.judges.trainer import train_judge

TOKENS = 64  # of each answer
RUNS = Path(__file__).parent / "runs"


class Learner(Protocol):
    """A base that can be fed, taught and asked."""

    def cut(self, kind: str, case: Case) -> LabelPromptTokens: ...

    def learn(self, lessons: Sequence[TrainingExample], recipe: Recipe, member: int, work: Path) -> dict[str, Any]: ...

    def known(self, cuts: Sequence[LabelPromptTokens]) -> np.ndarray[Any, Any]: ...


@dataclass
class CausalLearner:
    judge: CausalJudge
    shortened: dict[str, dict[str, str]] = field(default_factory=dict)

    def cut(self, kind: str, case: Case) -> LabelPromptTokens:
        key = f"{case.question.id} {case.texts['closed']}"
        if key not in self.shortened:
            self.shortened[key] = {side: self.judge.truncate(text, TOKENS) for side, text in case.texts.items()}
        return self.judge.encode(KINDS[kind].text(case.question, self.shortened[key]))

    def learn(self, lessons: Sequence[TrainingExample], recipe: Recipe, member: int, work: Path) -> dict[str, Any]:
        pupil = TrainableCausalModel(self.judge.model, self.judge.label_tokens)
        return _taught(pupil, lessons, recipe, member, work)

    def known(self, cuts: Sequence[LabelPromptTokens]) -> np.ndarray[Any, Any]:
        self.judge.model.loaded.model.eval()
        return self.judge.predict_known(cuts)


@dataclass
class EncoderLearner:
    pupil: TrainableEncoder

    def cut(self, kind: str, case: Case) -> LabelPromptTokens:
        return LabelPromptTokens(self.pupil.encoder.encode(case.question.text, KINDS[kind].pair(case.texts)), [0])

    def learn(self, lessons: Sequence[TrainingExample], recipe: Recipe, member: int, work: Path) -> dict[str, Any]:
        return _taught(self.pupil, lessons, recipe, member, work)

    def known(self, cuts: Sequence[LabelPromptTokens]) -> np.ndarray[Any, Any]:
        return self.pupil.encoder.predict_known([cut.ids for cut in cuts])


def _taught(pupil: Any, lessons: Sequence[TrainingExample], recipe: Recipe, member: int, work: Path) -> dict[str, Any]:
    usual = make_answer_training(recipe.epochs, recipe.batch, recipe.rate, full=recipe.full, seed=member)
    # no dev rows; two places to go on from in each epoch, but a small one is quicker done again than written
    training = replace(usual, checks=2, patience=0, saves=not recipe.full)
    trained = train_judge(pupil, lessons, [], training, work, _say)
    return {
        "losses": [round(loss, 4) for loss in trained.state.losses],
        "skipped": trained.state.skipped,
        "seconds": round(trained.state.seconds, 1),
    }


def _say(step: Any) -> None:
    if step.is_milestone or step.done % 640 < 64:
        print(step.words, flush=True)


def do_job(name: str, member: int, options: argparse.Namespace) -> None:
    """Train and score; the file with the scores comes last and whole, so that a killed job is done again."""
    train, test = load_cases("train", options.limit), load_cases("test", options.limit)
    file = options.work / name / f"{member}.json"
    if name == LABELS:
        write_json(file, spoken(options, train))
        return
    recipe = next(recipe for recipe in recipes() if recipe.name == name)
    fold = assign_folds([case.question.text for case in train], FOLDS)
    own = member % FOLDS  # further members learn the same rows from another start
    taught = _drawn([i for i in range(len(train)) if fold[i] != own], recipe.rows, member)
    left_out = [train[i] for i in range(len(train)) if fold[i] == own]
    shares = shares_of(recipe, train, options.work)
    extra = own_cases(RUNS, [*train, *test], options.limit) if recipe.own_runs else []
    if recipe.base.startswith("frozen:"):
        found = frozen(recipe, [train[i] for i in taught], left_out, test, options)
    else:
        learner = open_learner(recipe, member, options)
        lessons = [*lessons_of(learner, recipe, train, taught, shares), *extra_lessons(learner, extra)]
        work = options.work / name / f"training-{member}"
        facts = learner.learn(lessons, recipe, member, work)
        start = time.perf_counter()
        parts = {"dev": left_out, "test": test}
        scores = {split: asked(learner, recipe, cases) for split, cases in parts.items()}
        sizes = [len(learner.cut(kind, case).ids) for kind in recipe.asks.values() for case in test[:100]]
        found = {
            **scores,
            **facts,
            "lessons": len(lessons),
            "scoring_seconds": round(time.perf_counter() - start, 2),
            "tokens_per_question": round(float(np.mean(sizes)), 1),
        }
        shutil.rmtree(work, ignore_errors=True)
    learner = None
    _let_go()
    write_json(file, {**found, "rows": len(taught) + len(extra), "base": _base(recipe, options), "device": _device()})


def _drawn(places: list[int], n: int | None, seed: int) -> list[int]:
    if n is None or n >= len(places):
        return places
    return sorted(np.random.default_rng(seed).choice(places, n, replace=False).tolist())


def _base(recipe: Recipe, options: argparse.Namespace) -> str:
    return "Qwen2.5-Coder-1.5B" if recipe.base == "big" else recipe.base


def _let_go() -> None:
    """The next training of this process needs the room."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def open_learner(recipe: Recipe, member: int, options: argparse.Namespace) -> Learner:
    if recipe.base in ("mpnet", "minilm"):
        encoder = PairEncoder(resolve_encoder(recipe.base), member)
        encoder.load_weights()
        return EncoderLearner(TrainableEncoder(encoder))
    spec = options.big if recipe.base == "big" else options.small or recipe.base
    return CausalLearner(CausalJudge(load_judge_base(spec), ANSWER_LABELS))


def lessons_of(
    learner: Learner, recipe: Recipe, cases: Sequence[Case], places: Sequence[int], shares: Mapping[str, float]
) -> list[TrainingExample]:
    """Everything the recipe teaches about these rows; an answer that was there before is not taught again."""
    lessons = []
    for place in places:
        case = cases[place]
        if recipe.teacher and case.question.id not in shares:
            continue  # no teacher that did not learn from it
        for kind in recipe.teaches:
            if any(case.texts[KINDS[kind].side] == case.texts[other] for other in KINDS[kind].others):
                continue
            right = float(case.right[KINDS[kind].side])
            share = shares.get(case.question.id, right) if kind in ("judge", "question") else right
            lessons.append(TrainingExample(learner.cut(kind, case), (share,)))
    return lessons


def extra_lessons(learner: Learner, cases: Sequence[Case]) -> list[TrainingExample]:
    kinds = ("judge", "judge_open")
    return [
        TrainingExample(learner.cut(kind, case), (float(case.right[KINDS[kind].side]),))
        for case in cases
        for kind in kinds
        if kind == "judge" or case.texts["open"] != case.texts["closed"]
    ]


def shares_of(recipe: Recipe, cases: Sequence[Case], work: Path) -> dict[str, float]:
    """What stands in for gold, by the row's id; nothing where gold is learnt."""
    if recipe.labels in ("agrees", "agreed"):
        return {case.question.id: float(getattr(case, recipe.labels)) for case in cases}
    if recipe.labels in ("implied", "said"):
        spoken_file = work / LABELS / "0.json"
        return dict(json.loads(spoken_file.read_text(encoding="utf-8"))[recipe.labels])
    if not recipe.teacher:
        return {}
    members = {one.name: one.members for one in recipes()}
    taught = [
        mean_scores(
            [json.loads((work / name / f"{k}.json").read_text(encoding="utf-8")) for k in range(members[name])], "dev"
        )
        for name in recipe.teacher
    ]
    gold = {case.question.id: float(case.right["closed"]) for case in cases}
    soft = {key: float(np.mean([one["known"][key] for one in taught])) for key in taught[0]["known"]}
    return {key: recipe.gold * gold[key] + (1 - recipe.gold) * share for key, share in soft.items()}


def asked(learner: Learner, recipe: Recipe, cases: Sequence[Case]) -> dict[str, dict[str, float]]:
    """P(right) of every column, by the row's id."""
    found = {}
    for column, kind in recipe.asks.items():
        known = learner.known([learner.cut(kind, case) for case in cases])
        found[column] = {case.question.id: round(float(p), 6) for case, p in zip(cases, known, strict=True)}
    return found


def spoken(options: argparse.Namespace, cases: Sequence[Case]) -> dict[str, dict[str, float]]:
    """What the untrained big model says: is the answer right; does it imply the answer with documents."""
    learner = CausalLearner(CausalJudge(load_judge_base(options.big), ANSWER_LABELS))
    said = learner.known([learner.cut("judge", case) for case in cases])
    turns = [
        load_packaged_templates("judge").fill(
            "implies", "en", query=case.question.text, prediction=case.texts["closed"], answer=case.texts["open"]
        )
        for case in cases
    ]
    implied = learner.known([learner.judge.encode(turn) for turn in turns])
    ids = [case.question.id for case in cases]
    return {
        "said": dict(zip(ids, (float(p > 0.5) for p in said), strict=True)),
        "said_soft": dict(zip(ids, (round(float(p), 6) for p in said), strict=True)),
        "implied": dict(zip(ids, (float(p > 0.5) for p in implied), strict=True)),
    }


def frozen(
    recipe: Recipe, train: Sequence[Case], left_out: Sequence[Case], test: Sequence[Case], options: argparse.Namespace
) -> dict[str, Any]:
    """A logistic regression over embeddings of question and question + answer; the weights of the encoder stay."""
    from sklearn.linear_model import LogisticRegressionCV

    start = time.perf_counter()
    parts = [_embedded(recipe.base.partition(":")[2], cases) for cases in (train, left_out, test)]
    truth = [case.right["closed"] for case in train]
    fitted = LogisticRegressionCV(Cs=np.logspace(-2, 2, 9), max_iter=2000, scoring="neg_log_loss", cv=5)
    fitted.fit(parts[0], truth)
    scores = {
        split: {
            "known": dict(
                zip([c.question.id for c in cases], fitted.predict_proba(x)[:, 1].round(6).tolist(), strict=True)
            )
        }
        for split, cases, x in (("dev", left_out, parts[1]), ("test", test, parts[2]))
    }
    seconds = round(time.perf_counter() - start, 1)
    facts = {"losses": [], "skipped": 0, "seconds": seconds, "scoring_seconds": 0.0, "tokens_per_question": None}
    return {**scores, **facts, "lessons": len(train)}


_ROWS: dict[tuple[str, str], np.ndarray[Any, Any]] = {}  # of every question; the next training of it has them already


def _embedded(name: str, cases: Sequence[Case]) -> np.ndarray[Any, Any]:
    new = [case for case in cases if (name, case.question.id) not in _ROWS]
    if new:
        questions, answers = [case.question for case in new], [case.texts["closed"] for case in new]
        found = text_features(SentenceEmbedder(name), questions, answers, TOKENS)
        _ROWS.update({(name, case.question.id): row for case, row in zip(new, found, strict=True)})
    return np.stack([_ROWS[name, case.question.id] for case in cases])
