"""One training job of `benchmarks/judge_train.py`: train a member of a judge, then score its dev rows and the test rows."""

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

from benchmarks.judge_recipes import (
    FOLDS,
    LABELS_JOB,
    PROMPT_KINDS,
    Case,
    Recipe,
    list_recipes,
    load_cases,
    load_extra_cases,
    mean_scores,
)
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

ANSWER_TOKENS = 64  # longest answer that a judge reads
RUNS = Path(__file__).parent / "runs"


class JudgeModel(Protocol):
    """A base model that can be trained as a judge."""

    def encode(self, kind: str, case: Case) -> LabelPromptTokens:
        """Return the tokens of the prompt of this kind."""
        ...

    def train(self, examples: Sequence[TrainingExample], recipe: Recipe, member: int, work: Path) -> dict[str, Any]:
        """Train on the examples, and return losses, skipped examples and seconds. Checkpoints go to `work`."""
        ...

    def predict_known(self, prompts: Sequence[LabelPromptTokens]) -> np.ndarray[Any, Any]:
        """Return the probability of a right answer for each prompt."""
        ...


@dataclass
class CausalJudgeModel:
    """A causal LLM as a judge.

    Attributes:
        judge: The judge.
        truncated: Answers cut to `ANSWER_TOKENS`, by question and closed-book answer.
    """

    judge: CausalJudge
    truncated: dict[str, dict[str, str]] = field(default_factory=dict)

    def encode(self, kind: str, case: Case) -> LabelPromptTokens:
        """Return the tokens of the prompt of this kind."""
        key = f"{case.question.id} {case.texts['closed']}"
        if key not in self.truncated:
            self.truncated[key] = {side: self.judge.truncate(text, ANSWER_TOKENS) for side, text in case.texts.items()}
        return self.judge.encode(PROMPT_KINDS[kind].build_prompt(case.question, self.truncated[key]))

    def train(self, examples: Sequence[TrainingExample], recipe: Recipe, member: int, work: Path) -> dict[str, Any]:
        """Train on the examples, and return losses, skipped examples and seconds."""
        trainable = TrainableCausalModel(self.judge)
        return _train(trainable, examples, recipe, member, work)

    def predict_known(self, prompts: Sequence[LabelPromptTokens]) -> np.ndarray[Any, Any]:
        """Return the probability of a right answer for each prompt."""
        self.judge.model.loaded.model.eval()
        return self.judge.predict_known(prompts)


@dataclass
class EncoderJudgeModel:
    """A cross-encoder as a judge.

    Attributes:
        trainable: The encoder.
    """

    trainable: TrainableEncoder

    def encode(self, kind: str, case: Case) -> LabelPromptTokens:
        """Return the tokens of the text pair of this kind."""
        pair_text = PROMPT_KINDS[kind].build_pair_text(case.texts)
        return LabelPromptTokens(self.trainable.encoder.encode(case.question.text, pair_text), [0])

    def train(self, examples: Sequence[TrainingExample], recipe: Recipe, member: int, work: Path) -> dict[str, Any]:
        """Train on the examples, and return losses, skipped examples and seconds."""
        return _train(self.trainable, examples, recipe, member, work)

    def predict_known(self, prompts: Sequence[LabelPromptTokens]) -> np.ndarray[Any, Any]:
        """Return the probability of a right answer for each prompt."""
        return self.trainable.encoder.predict_known([prompt.ids for prompt in prompts])


def _train(
    trainable: Any, examples: Sequence[TrainingExample], recipe: Recipe, member: int, work: Path
) -> dict[str, Any]:
    defaults = make_answer_training(recipe.epochs, recipe.batch, recipe.learning_rate, full=recipe.full, seed=member)
    # There are no dev examples, so training cannot stop early. Two checkpoints are saved per epoch.
    training = replace(defaults, checks=2, patience=0)
    trained = train_judge(trainable, examples, [], training, work, _print_progress)
    return {
        "losses": [round(loss, 4) for loss in trained.state.losses],
        "skipped": trained.state.skipped,
        "seconds": round(trained.state.seconds, 1),
    }


def _print_progress(step: Any) -> None:
    if step.is_milestone or step.done % 640 < 64:
        print(step.words, flush=True)


@dataclass(frozen=True)
class MemberData:
    """Data of one member of a judge.

    Attributes:
        train: Rows to train on.
        dev: Rows of the fold that is left out.
        test: Test rows.
        extra: Rows of another LLM to train on as well.
        soft_labels: Label by row id, where it differs from the gold label.
    """

    train: list[Case]
    dev: list[Case]
    test: list[Case]
    extra: list[Case]
    soft_labels: Mapping[str, float]


def run_job(name: str, member: int, options: argparse.Namespace) -> None:
    """Train and score one member of a judge, and write its result.

    The result is written last and atomically, so a job that was killed runs again.

    Args:
        name: Name of the recipe, or `LABELS_JOB`.
        member: Number of the member.
        options: Options of `judge_train.py`.
    """
    train, test = load_cases("train", options.limit), load_cases("test", options.limit)
    file = options.work / name / f"{member}.json"
    if name == LABELS_JOB:
        write_json(file, label_with_untrained_model(options, train))
        return
    recipe = next(recipe for recipe in list_recipes() if recipe.name == name)
    data = _select_data(recipe, member, train, test, options)
    if recipe.base.startswith("frozen:"):
        result = fit_frozen_encoder(recipe, data)
    else:
        result = _train_and_score(recipe, member, data, options)
    _free_gpu_memory()
    n_rows = len(data.train) + len(data.extra)
    write_json(file, {**result, "rows": n_rows, "base": _name_base(recipe), "device": _name_device()})


def _select_data(
    recipe: Recipe, member: int, train: list[Case], test: list[Case], options: argparse.Namespace
) -> MemberData:
    folds = assign_folds([case.question.text for case in train], FOLDS)
    left_out = member % FOLDS  # Members beyond the number of folds train on the same rows with another seed.
    selected = _draw_rows([i for i in range(len(train)) if folds[i] != left_out], recipe.rows, member)
    return MemberData(
        train=[train[i] for i in selected],
        dev=[train[i] for i in range(len(train)) if folds[i] == left_out],
        test=test,
        extra=load_extra_cases(RUNS, [*train, *test], options.limit) if recipe.uses_extra_runs else [],
        soft_labels=load_soft_labels(recipe, train, options.work),
    )


def _train_and_score(recipe: Recipe, member: int, data: MemberData, options: argparse.Namespace) -> dict[str, Any]:
    model = load_judge_model(recipe, member, options)
    examples = [*make_examples(model, recipe, data.train, data.soft_labels), *make_extra_examples(model, data.extra)]
    work = options.work / recipe.name / f"training-{member}"
    facts = model.train(examples, recipe, member, work)
    start = time.perf_counter()
    scores = {split: score_cases(model, recipe, cases) for split, cases in (("dev", data.dev), ("test", data.test))}
    sizes = [len(model.encode(kind, case).ids) for kind in recipe.score_kinds.values() for case in data.test[:100]]
    result = {
        **scores,
        **facts,
        "lessons": len(examples),
        "scoring_seconds": round(time.perf_counter() - start, 2),
        "tokens_per_question": round(float(np.mean(sizes)), 1),
    }
    shutil.rmtree(work, ignore_errors=True)
    return result


def _draw_rows(indices: list[int], n: int | None, seed: int) -> list[int]:
    """Return `n` of the indices, drawn at random, or all of them."""
    if n is None or n >= len(indices):
        return indices
    return sorted(np.random.default_rng(seed).choice(indices, n, replace=False).tolist())


def _name_base(recipe: Recipe) -> str:
    return "Qwen2.5-Coder-1.5B" if recipe.base == "big" else recipe.base


def _free_gpu_memory() -> None:
    """Free the memory of the trained model for the next job of this process."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _name_device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def load_judge_model(recipe: Recipe, member: int, options: argparse.Namespace) -> JudgeModel:
    """Load the base model of a recipe; the member number seeds new weights."""
    if recipe.base in ("mpnet", "minilm"):
        encoder = PairEncoder(resolve_encoder(recipe.base), member)
        encoder.load_weights()
        return EncoderJudgeModel(TrainableEncoder(encoder))
    spec = options.big if recipe.base == "big" else options.small or recipe.base
    return CausalJudgeModel(CausalJudge(load_judge_base(spec), ANSWER_LABELS))


def make_examples(
    model: JudgeModel, recipe: Recipe, cases: Sequence[Case], soft_labels: Mapping[str, float]
) -> list[TrainingExample]:
    """Return the training examples of a recipe for these rows. An answer that occurs twice is used once."""
    examples = []
    for case in cases:
        if recipe.teacher and case.question.id not in soft_labels:
            continue  # Every teacher was trained on this row, so none of them can label it.
        for kind_name in recipe.train_kinds:
            kind = PROMPT_KINDS[kind_name]
            if any(case.texts[kind.side] == case.texts[side] for side in kind.skip_if_equal_to):
                continue
            gold = float(case.right[kind.side])
            label = soft_labels.get(case.question.id, gold) if kind_name in ("judge", "question") else gold
            examples.append(TrainingExample(model.encode(kind_name, case), (label,)))
    return examples


def make_extra_examples(model: JudgeModel, cases: Sequence[Case]) -> list[TrainingExample]:
    """Return training examples from answers of another LLM."""
    return [
        TrainingExample(model.encode(kind, case), (float(case.right[PROMPT_KINDS[kind].side]),))
        for case in cases
        for kind in ("judge", "judge_open")
        if kind == "judge" or case.texts["open"] != case.texts["closed"]
    ]


def load_soft_labels(recipe: Recipe, cases: Sequence[Case], work: Path) -> dict[str, float]:
    """Return the labels that replace gold labels, by row id; empty if the recipe trains on gold labels."""
    if recipe.labels in ("agreement", "agreement_share"):
        return {case.question.id: float(getattr(case, recipe.labels)) for case in cases}
    if recipe.labels in ("implied", "said"):
        labels_file = work / LABELS_JOB / "0.json"
        return dict(json.loads(labels_file.read_text(encoding="utf-8"))[recipe.labels])
    if not recipe.teacher:
        return {}
    members = {other.name: other.members for other in list_recipes()}
    teachers = [
        mean_scores(
            [json.loads((work / name / f"{k}.json").read_text(encoding="utf-8")) for k in range(members[name])], "dev"
        )
        for name in recipe.teacher
    ]
    gold = {case.question.id: float(case.right["closed"]) for case in cases}
    soft = {key: float(np.mean([teacher["known"][key] for teacher in teachers])) for key in teachers[0]["known"]}
    return {key: recipe.gold_weight * gold[key] + (1 - recipe.gold_weight) * label for key, label in soft.items()}


def score_cases(model: JudgeModel, recipe: Recipe, cases: Sequence[Case]) -> dict[str, dict[str, float]]:
    """Return the probability of a right answer, by column and row id."""
    scores = {}
    for column, kind in recipe.score_kinds.items():
        known = model.predict_known([model.encode(kind, case) for case in cases])
        scores[column] = {case.question.id: round(float(p), 6) for case, p in zip(cases, known, strict=True)}
    return scores


def label_with_untrained_model(options: argparse.Namespace, cases: Sequence[Case]) -> dict[str, dict[str, float]]:
    """Label rows with the untrained 1.5B model, as substitutes for gold labels.

    Returns:
        Labels by row id: "said" and "said_soft" (whether the closed-book answer is right, as 0 or 1 and as a probability)
        and "implied" (whether the closed-book answer implies the answer with retrieval).
    """
    model = CausalJudgeModel(CausalJudge(load_judge_base(options.big), ANSWER_LABELS))
    right = model.predict_known([model.encode("judge", case) for case in cases])
    prompts = [
        load_packaged_templates("judge").fill(
            "implies", "en", query=case.question.text, prediction=case.texts["closed"], answer=case.texts["open"]
        )
        for case in cases
    ]
    implied = model.predict_known([model.judge.encode(prompt) for prompt in prompts])
    ids = [case.question.id for case in cases]
    return {
        "said": dict(zip(ids, (float(p > 0.5) for p in right), strict=True)),
        "said_soft": dict(zip(ids, (round(float(p), 6) for p in right), strict=True)),
        "implied": dict(zip(ids, (float(p > 0.5) for p in implied), strict=True)),
    }


def fit_frozen_encoder(recipe: Recipe, data: MemberData) -> dict[str, Any]:
    """Fit a logistic regression over embeddings of the question and of question and answer; the encoder stays frozen."""
    from sklearn.linear_model import LogisticRegressionCV

    start = time.perf_counter()
    encoder = recipe.base.partition(":")[2]
    train, dev, test = (_embed(encoder, cases) for cases in (data.train, data.dev, data.test))
    labels = [case.right["closed"] for case in data.train]
    classifier = LogisticRegressionCV(Cs=np.logspace(-2, 2, 9), max_iter=2000, scoring="neg_log_loss", cv=5)
    classifier.fit(train, labels)
    scores = {}
    for split, cases, features in (("dev", data.dev, dev), ("test", data.test, test)):
        known = classifier.predict_proba(features)[:, 1].round(6).tolist()
        scores[split] = {"known": dict(zip([case.question.id for case in cases], known, strict=True))}
    seconds = round(time.perf_counter() - start, 1)
    facts = {"losses": [], "skipped": 0, "seconds": seconds, "scoring_seconds": 0.0, "tokens_per_question": None}
    return {**scores, **facts, "lessons": len(data.train)}


_EMBEDDINGS: dict[tuple[str, str], np.ndarray[Any, Any]] = {}  # by encoder and question id, for all jobs of the process


def _embed(encoder: str, cases: Sequence[Case]) -> np.ndarray[Any, Any]:
    new = [case for case in cases if (encoder, case.question.id) not in _EMBEDDINGS]
    if new:
        questions, answers = [case.question for case in new], [case.texts["closed"] for case in new]
        features = text_features(SentenceEmbedder(encoder), questions, answers, ANSWER_TOKENS)
        _EMBEDDINGS.update({(encoder, case.question.id): row for case, row in zip(new, features, strict=True)})
    return np.stack([_EMBEDDINGS[encoder, case.question.id] for case in cases])
