"""What a first run can prove with its questions, and how long it will take: said before the slow steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.evaluation.first_run.labeling import MIN_QUESTIONS_TO_SPLIT, PART_ROTATION
from knowgate.evaluation.first_run.options import ProgressReporter
from knowgate.gates.calibration.guarantee import compute_required_rows
from knowgate.models.prompts.answers import load_answer_prompts
from knowgate.training.examples import MIN_GRADED_ROWS
from knowgate.types import Model, Question, Retriever

RECOMMENDED_QUESTIONS = 240  # with that many, a trained gate can be proven on the held-out ones
MIN_POLICY_ROWS = 400  # graded rows for a policy: its held-out quarter can then prove a loss of 5 %, with answers lost
ANSWER_TOKENS = 32  # tokens of an answer while timing
CONFIDENCE = 0.95
PROOF_SHARE = 1 - PART_ROTATION.count("test") / len(PART_ROTATION)  # of the questions: those that may prove a threshold
POLICY_QUESTIONS = math.ceil(MIN_POLICY_ROWS / PROOF_SHARE)


@dataclass(frozen=True)
class Provability:
    """What a number of questions can prove at best.

    Attributes:
        count: Number of questions.
        max_loss: Maximum share of right answers that skipping may lose.
    """

    count: int
    max_loss: float

    @property
    def required(self) -> int:
        """Questions that are needed to prove `max_loss`, if skipping loses no answer."""
        rows = compute_required_rows(self.max_loss, (1 - CONFIDENCE) / 2)  # two gates share the error probability
        return max(MIN_QUESTIONS_TO_SPLIT, math.ceil(rows / PROOF_SHARE))

    @property
    def is_enough(self) -> bool:
        """Whether the questions can prove `max_loss`."""
        return self.count >= self.required

    @property
    def proposed(self) -> int:
        """Number of questions to propose: enough to prove a gate that is trained on them."""
        return max(RECOMMENDED_QUESTIONS, self.required)

    def describe(self) -> str:
        """Say what the questions can prove, and how many would prove more."""
        loss = f"that skipping loses at most {100 * self.max_loss:g} % of the answers"
        if not self.is_enough:
            return (
                f"{self.count} questions cannot prove {loss}: that takes {self.required} or more, better {self.proposed}. "
                f"{self._name_missing()}This run only measures; its settings will retrieve for every question."
            )
        more = "" if self.count >= POLICY_QUESTIONS else f" {self._suggest_more()}"
        return f"{self.count} questions can prove {loss}, if few are lost.{more}"

    def _name_missing(self) -> str:
        needed = math.ceil(MIN_GRADED_ROWS * len(PART_ROTATION) / PART_ROTATION.count("fit"))
        return f"Training a gate takes {needed}. " if self.count < needed else ""

    def _suggest_more(self) -> str:
        if self.count < self.proposed:
            return f"{self.proposed} could prove a gate that is trained on them; {POLICY_QUESTIONS}, a policy."
        return f"{POLICY_QUESTIONS} could prove a policy, which chooses gate, arbiter and threshold together."


def report_plan(n_questions: int, max_loss: float, reporter: ProgressReporter) -> None:
    """Report what the questions can prove; as a warning if that is nothing."""
    provable = Provability(n_questions, max_loss)
    (reporter.say if provable.is_enough else reporter.warn)(provable.describe())


def report_label_time(
    questions: Sequence[Question], n_labeled: int, model: Model, retriever: Retriever, reporter: ProgressReporter
) -> None:
    """Time one question and report how long labeling will take.

    Args:
        questions: The questions to label.
        n_labeled: How many of them are labeled already.
        model: The LLM.
        retriever: Searches for passages.
        reporter: Receives the message.
    """
    n = len(questions) - n_labeled
    if n <= 0:
        return
    seconds = time_question(questions[-1], model, retriever)
    is_policy = len(questions) >= POLICY_QUESTIONS
    rest = (
        "Fitting a policy takes some minutes more."
        if is_policy
        else "Choosing a gate and the report take a minute more."
    )
    reporter.say(f"Labeling {n} questions takes {format_duration(n * seconds)} ({seconds:.1f} s each). {rest}")


def time_question(question: Question, model: Model, retriever: Retriever) -> float:
    """Return the seconds that answering a question takes, once without and once with passages."""
    prompts, start = load_answer_prompts(model=model), time.perf_counter()
    (passages,) = retriever.search([question.text], 3)
    for prompt in (prompts.closed(question), prompts.open(question, passages)):
        if model.fits([prompt], ANSWER_TOKENS)[0]:
            model.generate([prompt], max_tokens=ANSWER_TOKENS)
    return time.perf_counter() - start


def format_duration(seconds: float) -> str:
    """Format a duration in words: 'less than a minute', 'about 5 minutes'."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 5400:
        minutes = math.ceil(seconds / 60)
        return f"about {minutes} minutes" if minutes > 1 else "about a minute"
    return f"about {seconds / 3600:.1f} hours"
