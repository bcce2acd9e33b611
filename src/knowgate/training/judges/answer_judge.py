"""Fitting a judge of answers: a causal model, or a small encoder, learns where the LLM's answer is right.

The judge of black boxes and IK's fine-tuned mode are settings of it: another question is asked, nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from knowgate.data.signals.vectors import draft_texts
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import load_fitted_gate
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.judges import ANSWER_LABELS, ANSWER_PROMPTS, AnswerJudge, encode_answers
from knowgate.gates.judges.encoder_judge import is_encoder_spec
from knowgate.gates.offline_scoring import mark_seen_rows
from knowgate.models.embedded_weights import get_weights
from knowgate.stats.metrics import FloatArray
from knowgate.training.examples import Examples
from knowgate.training.fit_function import ExampleRequirements, FitProgressCallback, FitResult, ignore_progress
from knowgate.training.judges.ensemble import (
    FOLDS_HELP,
    SEEDS_HELP,
    EnsembleMember,
    FittedJudge,
    fit_judge,
    plan_ensemble,
)
from knowgate.training.judges.trainable_models import JudgeKind, TrainingExample, select_judge_kind
from knowgate.training.judges.trainer import JudgeProgressCallback
from knowgate.training.judges.training_options import FULL_HELP, JudgeTrainingOptions
from knowgate.types import Signal, SignalRequest

if TYPE_CHECKING:
    from knowgate.models.tokenization import LabelPromptTokens


GOLD_LABEL_WEIGHT = 0.5  # how much the graded answer counts beside the teacher's word


@dataclass(frozen=True)
class SoftLabels:
    """P(right) to be learnt for each row, and what the card says of them."""

    shares: FloatArray
    notes: list[str]


def make_hard_labels(examples: Examples) -> SoftLabels:
    """What was graded, and nothing else."""
    return SoftLabels((~examples.needed).astype(np.float64), [])


def make_soft_labels(examples: Examples, teacher: str, places: Iterable[int]) -> SoftLabels:
    """Grades and the teacher's word, half and half, at these rows; the others, by which training stops, stay graded."""
    gate, shares = load_fitted_gate(teacher), make_hard_labels(examples).shares
    _check(teacher, gate)
    taught = sorted(places)
    needs = gate.score([examples.questions[i] for i in taught], [examples.readings[i] for i in taught])
    shares[taught] = GOLD_LABEL_WEIGHT * shares[taught] + (1 - GOLD_LABEL_WEIGHT) * (1 - np.array(needs))
    seen = sum(mark_seen_rows(examples.trial.subset(taught), teacher))
    heard = f"taught by the gate '{gate.artifact.path.name}': its word counts half, the grade half"
    known = f"; it had learnt from {seen} of the {len(taught)} rows itself, where its word adds less" if seen else ""
    return SoftLabels(shares, [heard + known])


def _check(folder: str, gate: FittedGate) -> None:
    target = gate.artifact.manifest.get("target")
    if target == "benefit":
        raise BadSetting(
            f"the teacher '{folder}' was fitted on 'benefit': it says whether retrieval helps, not whether an answer "
            "is right. Take a gate that was fitted on 'known'."
        )
    if missing := gate.needs - {Signal.DRAFT}:
        raise BadSetting(
            f"the teacher '{folder}' needs {', '.join(sorted(missing))}, and a judge is taught by text alone. Take "
            "a judge, or ik."
        )


CAUSAL_BASE_HELP = "smollm, hf:NAME, gguf:FILE. Default: the LLM."
MPNET_HELP = f"mpnet ({get_weights('mpnet').megabytes} MB to fetch)"
ANY_BASE_HELP = f"small, {MPNET_HELP} (no GPU needed), smollm, hf:NAME, gguf:FILE, encoder:DIR. Default: the LLM."
TEACHER_HELP = "Fitted judge whose word is learnt, too."
ENCODER_LEARNING_RATE, ENCODER_LEARNING_RATES = 1e-4, {"mpnet": 3e-5}  # of the peak; those that were measured with
COST_SAMPLE_SIZE = 200  # rows whose prompts are counted
TOKENS_HELP = "Answer tokens it reads; 0: question alone."
MAX_EXAMPLE_TOKENS = 512  # of a lesson: answers are short, and the longest decides how much memory a batch takes


def fit_answer_judge(
    examples: Annotated[Examples, ExampleRequirements(target="known", reads_states=False)],
    *,
    base: Annotated[str | None, ANY_BASE_HELP] = None,
    tokens: Annotated[int, TOKENS_HELP] = 64,
    seeds: Annotated[int, SEEDS_HELP] = 1,
    folds: Annotated[int, FOLDS_HELP] = 0,
    both: Annotated[bool, "Learn from the open-book answers, too."] = False,
    teacher: Annotated[str | None, TEACHER_HELP] = None,
    epochs: Annotated[int | None, "Walks over the examples. Default: 2; of encoders 4."] = None,
    learning_rate: Annotated[float | None, "Default: 1e-4; 1e-5 with full; 3e-5 for mpnet."] = None,
    batch: Annotated[int, "Examples per update."] = 32,
    full: Annotated[bool, FULL_HELP] = False,
    bits: Annotated[int, "4 or 8: of the base's weights (CUDA, LoRA)."] = 0,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """A small model learns whether the LLM's answer is right; for LLMs behind an API."""
    small, read = is_encoder_spec(base or ""), limit_answer_tokens(examples, tokens)
    check_trainable_bits(bits, full=full or small)
    check_judge_answers(examples, read, both)
    training = make_default_training(base, epochs, batch, learning_rate, full=full, seed=seed)
    members = plan_ensemble(examples.split, training, seeds, folds, [question.text for question in examples.questions])
    learnt = frozenset().union(*(member.train for member in members))
    labels = make_soft_labels(examples, teacher, learnt) if teacher else make_hard_labels(examples)
    school = select_judge_kind(base or str(examples.settings["model"]), bits)
    return train_answer_judge(
        "judge", examples, read, members, base=base, both=both, labels=labels, school=school, work=work, watch=watch
    )


def make_default_training(
    base: str | None, epochs: int | None, batch: int, rate: float | None, *, full: bool, seed: int
) -> JudgeTrainingOptions:
    """With what suits the base where nothing is said."""
    small = is_encoder_spec(base or "")
    walks = epochs if epochs is not None else 4 if small else 2
    usual = ENCODER_LEARNING_RATES.get(base or "", ENCODER_LEARNING_RATE) if small else None
    return make_answer_training(walks, batch, usual if rate is None else rate, full=full or small, seed=seed)


def make_answer_training(
    epochs: int, batch: int, rate: float | None, *, accumulate: int = 1, full: bool = False, seed: int = 0
) -> JudgeTrainingOptions:
    """What judges of answers are trained with (METHODS, section 9); two looks at the dev split per epoch."""
    return JudgeTrainingOptions(
        epochs,
        batch,
        accumulate,
        rate,
        max_tokens=MAX_EXAMPLE_TOKENS,
        full=full,
        seed=seed,
        whole_vocabulary=False,
        schedule="one-cycle",
        weight_decay=0.01,
        checks=2,
        patience=2,
        window=8,
    )


def train_answer_judge(
    gate: str,
    examples: Examples,
    tokens: int,
    members: Sequence[EnsembleMember],
    *,
    base: str | None = None,
    both: bool = False,
    labels: SoftLabels | None = None,
    school: JudgeKind[Any] | None = None,
    work: Path,
    watch: JudgeProgressCallback | None = None,
) -> FitResult:
    """Fine-tune a judge on the closed-book answers. gate: judge or ik, which is what it is asked by.

    base: the model to fine-tune, the answering LLM by default. labels: what it learns, the grades by default.
    work: where training is kept until it is done.
    """
    texts = draft_texts(examples.readings) if tokens else [""] * len(examples.questions)
    spec = base or str(examples.settings["model"])

    told = labels or make_hard_labels(examples)

    def asked(judge: AnswerJudge, places: Sequence[int]) -> list[LabelPromptTokens]:
        return encode_answers(gate, judge, [examples.questions[i] for i in places], [texts[i] for i in places], tokens)

    def lessons(judge: AnswerJudge, places: Sequence[int]) -> list[TrainingExample]:
        shares = [(float(told.shares[i]),) for i in places]
        own = [TrainingExample(cut, share) for cut, share in zip(asked(judge, places), shares, strict=True)]
        return own + (_opened(gate, judge, examples, places, tokens) if both else [])

    prompts, taught_in = ANSWER_PROMPTS[gate].templates, school or select_judge_kind(spec)
    fit = fit_judge(members, ANSWER_LABELS, prompts, lessons, school=taught_in, base=spec, work=work, watch=watch)

    def raw(places: Sequence[int]) -> FloatArray:
        return 1 - fit.known(asked(fit.judge, places), places)

    options = {"tokens": tokens, **fit.options}
    needs = frozenset({Signal.DRAFT}) if tokens else frozenset[Signal]()
    notes = [*told.notes, *fit.notes, describe_cost(fit, asked, len(texts))]
    whole = fit.learnt == frozenset(range(len(texts)))
    return FitResult(gate, options, needs, SignalRequest(draft_tokens=tokens), {}, raw, notes, fit.files, whole)


def _opened(
    gate: str, judge: AnswerJudge, examples: Examples, places: Sequence[int], tokens: int
) -> list[TrainingExample]:
    """The same question about the open-book answers of these rows, where they say something else and are graded."""
    rows = [(examples.questions[i], examples.rows[i].closed, examples.rows[i].open) for i in places]
    told = [
        (question, side.text, side.correct)
        for question, closed, side in rows
        if side is not None and side.correct is not None and (closed is None or side.text != closed.text)
    ]
    cuts = encode_answers(gate, judge, [one[0] for one in told], [one[1] for one in told], tokens)
    return [TrainingExample(cut, (float(right),)) for cut, (_, _, right) in zip(cuts, told, strict=True)]


def limit_answer_tokens(examples: Examples, tokens: int) -> int:
    """Tokens of the answer to read: no more than were drafted, so that the gate drafts as many as it learnt from."""
    if tokens < 0:
        raise BadSetting(f"judge: tokens is {tokens}; it must be 0 (the question alone) or more.")
    return min(tokens, int(examples.settings.get("max_tokens", tokens)))


def check_trainable_bits(bits: int, *, full: bool) -> None:
    """Before anything is read: whether weights of so few bits can be had, and be learnt with."""
    if not bits:
        return
    if full:
        raise BadSetting("weights of so few bits cannot learn: --bits is for LoRA on a causal base, without --full.")
    from knowgate.models.hf.loader import check_bits

    check_bits(bits)


def check_judge_answers(examples: Examples, tokens: int, both: bool = False) -> None:
    """Refuse answers that tell a judge nothing, and say why."""
    texts = draft_texts(examples.readings)
    if tokens and not any(text.strip() for text in texts):
        raise BadInput(
            "every answer from memory is empty: a judge of answers has nothing to read. Label with a larger "
            "--max-tokens, or let it judge questions alone: --tokens 0"
        )
    if tokens and all(RULES_ARBITER.abstains(text) for text in texts):
        raise BadInput(
            f"every answer from memory says that it cannot tell ('{texts[0][:60]}'): there is nothing to judge. Label "
            "with prompts that make the LLM guess, or let it judge questions alone: --tokens 0"
        )
    if both and not any(row.open is not None and row.open.correct is not None for row in examples.rows):
        raise BadInput(
            "no row has a graded open-book answer, which --both learns from. Label with passages (knowgate label "
            "--index DIR), import them (knowgate import-answers --open KEY), or leave --both away."
        )


def describe_cost(
    fit: FittedJudge[Any], asked: Callable[[AnswerJudge, Sequence[int]], list[LabelPromptTokens]], n: int
) -> str:
    """What a question costs in tokens of the judge, on a sample of the rows."""
    places = list(range(0, n, max(1, n // COST_SAMPLE_SIZE)))
    mean = sum(len(cut.ids) for cut in asked(fit.judge, places)) / len(places)
    times = f", read {len(fit.members)} times" if len(fit.members) > 1 else ""
    return f"cost per question: {mean:.0f} tokens of the judge{times}"
