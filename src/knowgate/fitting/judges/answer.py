"""Fitting a judge of answers: a causal model, or a small encoder, learns where the LLM's answer is right.

The judge of black boxes and IK's fine-tuned mode are settings of it: another question is asked, nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from knowgate.arbiters import RULES
from knowgate.errors import BadInput, BadSetting
from knowgate.fitting.examples import Examples
from knowgate.fitting.fit_options import Wanted
from knowgate.fitting.fit_result import FitResult
from knowgate.fitting.judges.artefact import JudgeFit, fit_judge
from knowgate.fitting.judges.crew import FOLDS, SEEDS, Member, crew
from knowgate.fitting.judges.lessons import Lesson
from knowgate.fitting.judges.schools import School, answer_school
from knowgate.fitting.judges.settings import FULL, JudgeTraining
from knowgate.fitting.judges.teacher import SoftLabels, plain_labels, soft_labels
from knowgate.fitting.judges.training import Watch
from knowgate.fitting.steps import WatchFit, unwatched
from knowgate.gates import ANSWER_LABELS, ANSWER_PROMPTS, AnswerJudge, answer_cuts, is_encoder
from knowgate.signals import draft_texts
from knowgate.statistics import Floats
from knowgate.types import Signal, Want
from knowgate.weights import lookup

if TYPE_CHECKING:
    from knowgate.models import MarkedTokens

BASE = "smollm, hf:NAME, gguf:FILE. Default: the LLM."
MPNET = f"mpnet ({lookup('mpnet').megabytes} MB to fetch)"
ANY_BASE = f"small, {MPNET} (no GPU needed), smollm, hf:NAME, gguf:FILE, encoder:DIR. Default: the LLM."
TEACHER = "Fitted judge whose word is learnt, too."
ENCODER_RATE, ENCODER_RATES = 1e-4, {"mpnet": 3e-5}  # of the peak; those that were measured with
SAMPLED = 200  # rows whose prompts are counted
TOKENS = "Answer tokens it reads; 0: question alone."
MOST_TOKENS = 512  # of a lesson: answers are short, and the longest decides how much memory a batch takes


def fit_answer(
    examples: Annotated[Examples, Wanted(target="known", reads_states=False)],
    *,
    base: Annotated[str | None, ANY_BASE] = None,
    tokens: Annotated[int, TOKENS] = 64,
    seeds: Annotated[int, SEEDS] = 1,
    folds: Annotated[int, FOLDS] = 0,
    both: Annotated[bool, "Learn from the open-book answers, too."] = False,
    teacher: Annotated[str | None, TEACHER] = None,
    epochs: Annotated[int | None, "Walks over the examples. Default: 2; of encoders 4."] = None,
    learning_rate: Annotated[float | None, "Default: 1e-4; 1e-5 with full; 3e-5 for mpnet."] = None,
    batch: Annotated[int, "Examples per update."] = 32,
    full: Annotated[bool, FULL] = False,
    bits: Annotated[int, "4 or 8: of the base's weights (CUDA, LoRA)."] = 0,
    seed: int = 0,
    work: Path,
    watch: WatchFit = unwatched,
) -> FitResult:
    """A small model learns whether the LLM's answer is right; for LLMs behind an API."""
    small, read = is_encoder(base or ""), tokens_read(examples, tokens)
    check_learnable(bits, full=full or small)
    check_answers(examples, read, both)
    training = usual_training(base, epochs, batch, learning_rate, full=full, seed=seed)
    members = crew(examples.split, training, seeds, folds, [question.text for question in examples.questions])
    learnt = frozenset().union(*(member.train for member in members))
    labels = soft_labels(examples, teacher, learnt) if teacher else plain_labels(examples)
    school = answer_school(base or str(examples.settings["model"]), bits)
    return fit_answers(
        "judge", examples, read, members, base=base, both=both, labels=labels, school=school, work=work, watch=watch
    )


def usual_training(
    base: str | None, epochs: int | None, batch: int, rate: float | None, *, full: bool, seed: int
) -> JudgeTraining:
    """With what suits the base where nothing is said."""
    small = is_encoder(base or "")
    walks = epochs if epochs is not None else 4 if small else 2
    usual = ENCODER_RATES.get(base or "", ENCODER_RATE) if small else None
    return answer_training(walks, batch, usual if rate is None else rate, full=full or small, seed=seed)


def answer_training(
    epochs: int, batch: int, rate: float | None, *, accumulate: int = 1, full: bool = False, seed: int = 0
) -> JudgeTraining:
    """What judges of answers are trained with (METHODS, section 9); two looks at the dev split per epoch."""
    return JudgeTraining(
        epochs,
        batch,
        accumulate,
        rate,
        max_tokens=MOST_TOKENS,
        full=full,
        seed=seed,
        whole_vocabulary=False,
        schedule="one-cycle",
        weight_decay=0.01,
        checks=2,
        patience=2,
        window=8,
    )


def fit_answers(
    gate: str,
    examples: Examples,
    tokens: int,
    members: Sequence[Member],
    *,
    base: str | None = None,
    both: bool = False,
    labels: SoftLabels | None = None,
    school: School[Any] | None = None,
    work: Path,
    watch: Watch | None = None,
) -> FitResult:
    """Fine-tune a judge on the closed-book answers. gate: judge or ik, which is what it is asked by.

    base: the model to fine-tune, the answering LLM by default. labels: what it learns, the grades by default.
    work: where training is kept until it is done.
    """
    texts = draft_texts(examples.readings) if tokens else [""] * len(examples.questions)
    spec = base or str(examples.settings["model"])

    told = labels or plain_labels(examples)

    def asked(judge: AnswerJudge, places: Sequence[int]) -> list[MarkedTokens]:
        return answer_cuts(gate, judge, [examples.questions[i] for i in places], [texts[i] for i in places], tokens)

    def lessons(judge: AnswerJudge, places: Sequence[int]) -> list[Lesson]:
        shares = [(float(told.shares[i]),) for i in places]
        own = [Lesson(cut, share) for cut, share in zip(asked(judge, places), shares, strict=True)]
        return own + (_opened(gate, judge, examples, places, tokens) if both else [])

    prompts, taught_in = ANSWER_PROMPTS[gate].templates, school or answer_school(spec)
    fit = fit_judge(members, ANSWER_LABELS, prompts, lessons, school=taught_in, base=spec, work=work, watch=watch)

    def raw(places: Sequence[int]) -> Floats:
        return 1 - fit.known(asked(fit.judge, places), places)

    options = {"tokens": tokens, **fit.options}
    needs = frozenset({Signal.DRAFT}) if tokens else frozenset[Signal]()
    notes = [*told.notes, *fit.notes, cost_note(fit, asked, len(texts))]
    whole = fit.learnt == frozenset(range(len(texts)))
    return FitResult(gate, options, needs, Want(draft_tokens=tokens), {}, raw, notes, fit.files, whole)


def _opened(gate: str, judge: AnswerJudge, examples: Examples, places: Sequence[int], tokens: int) -> list[Lesson]:
    """The same question about the open-book answers of these rows, where they say something else and are graded."""
    rows = [(examples.questions[i], examples.rows[i].closed, examples.rows[i].open) for i in places]
    told = [
        (question, side.text, side.correct)
        for question, closed, side in rows
        if side is not None and side.correct is not None and (closed is None or side.text != closed.text)
    ]
    cuts = answer_cuts(gate, judge, [one[0] for one in told], [one[1] for one in told], tokens)
    return [Lesson(cut, (float(right),)) for cut, (_, _, right) in zip(cuts, told, strict=True)]


def tokens_read(examples: Examples, tokens: int) -> int:
    """Tokens of the answer to read: no more than were drafted, so that the gate drafts as many as it learnt from."""
    if tokens < 0:
        raise BadSetting(f"judge: tokens is {tokens}; it must be 0 (the question alone) or more.")
    return min(tokens, int(examples.settings.get("max_tokens", tokens)))


def check_learnable(bits: int, *, full: bool) -> None:
    """Before anything is read: whether weights of so few bits can be had, and be learnt with."""
    if not bits:
        return
    if full:
        raise BadSetting("weights of so few bits cannot learn: --bits is for LoRA on a causal base, without --full.")
    from knowgate.models import check_bits

    check_bits(bits)


def check_answers(examples: Examples, tokens: int, both: bool = False) -> None:
    """Refuse answers that tell a judge nothing, and say why."""
    texts = draft_texts(examples.readings)
    if tokens and not any(text.strip() for text in texts):
        raise BadInput(
            "every answer from memory is empty: a judge of answers has nothing to read. Label with a larger "
            "--max-tokens, or let it judge questions alone: --tokens 0"
        )
    if tokens and all(RULES.abstains(text) for text in texts):
        raise BadInput(
            f"every answer from memory says that it cannot tell ('{texts[0][:60]}'): there is nothing to judge. Label "
            "with prompts that make the LLM guess, or let it judge questions alone: --tokens 0"
        )
    if both and not any(row.open is not None and row.open.correct is not None for row in examples.rows):
        raise BadInput(
            "no row has a graded open-book answer, which --both learns from. Label with passages (knowgate label "
            "--index DIR), import them (knowgate import-answers --open KEY), or leave --both away."
        )


def cost_note(fit: JudgeFit[Any], asked: Callable[[AnswerJudge, Sequence[int]], list[MarkedTokens]], n: int) -> str:
    """What a question costs in tokens of the judge, on a sample of the rows."""
    places = list(range(0, n, max(1, n // SAMPLED)))
    mean = sum(len(cut.ids) for cut in asked(fit.judge, places)) / len(places)
    times = f", read {len(fit.members)} times" if len(fit.members) > 1 else ""
    return f"cost per question: {mean:.0f} tokens of the judge{times}"
