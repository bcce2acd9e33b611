"""The gate KBM (knowledge boundary model): a judge model predicts whether the LLM masters a question.

It can also predict whether the LLM is certain, that is, whether its sampled answers agree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from knowgate.core.schema import read_record
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.networks import TensorValidator
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.judges.causal_judge import ADAPTER_FOLDER, CausalJudge, JudgeOptions, load_judge
from knowgate.models.prompts.questions import build_kbm_prompt
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.types import Passage, Question, Reading

KBM_LABELS = ("True", "False")
KBM_HEADS = ("mastery", "certainty")
MASTERY_START, CERTAINTY_START = '{"mastery": "', '", "certainty": "'
PASSAGE_EXAMPLES = "passage_lessons"  # the option that counts the training examples with passages
# With verdict=own, passages are kept from this uncalibrated confidence on, as in the paper. The calibration is only valid
# for questions without passages.
SUFFICIENT_CONFIDENCE = 0.5


@dataclass(frozen=True, kw_only=True)
class KbmOptions(JudgeOptions):
    """Options of a judge of the gate `kbm` (knowledge boundary model) in `gate.json`.

    Attributes:
        head: What the judge predicts. 'mastery' is the share of sampled answers that are right, 'certainty' how much
            they agree.
    """

    head: Literal["mastery", "certainty"]


@dataclass(frozen=True)
class KbmGate(FittedGate):
    """Asks a fine-tuned judge model whether the LLM masters a question. The judge sees only the question.

    The judge predicts mastery or certainty. Mastery is the share of sampled answers that are right, certainty their
    agreement. The judge answers True or False, and the uncalibrated need is P(False) / (P(True) + P(False)). The
    calibrated need is the probability of a wrong answer. With the spec `DIR,verdict=own`, the more probable label
    decides, as in the paper.

    A judge that was trained with passages can also filter passages. It drops passages that make a right answer less
    likely. With `DIR,verdict=own`, it drops passages if a wrong answer is likely even with the passages. This is the
    rule of the paper, which loses right answers if the LLM knows little.

    Needs: nothing of the LLM. Cost per question: the judge reads 90 tokens once for mastery, twice for certainty.
    Reference: Zhang et al. (KBM), sections 4, 5.3 and 5.4, Figure 14.

    Example:
        >>> gate = KbmGate.load("my-kbm")  # doctest: +SKIP
    """

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the options or tensors of the gate are wrong."""
        read_record(KbmOptions, self.artifact.options, "options", ignore_unknown=True)
        tensors.reject_unknown()

    @functools.cached_property
    def judge(self) -> CausalJudge:
        """The judge model, loaded on first use."""
        return load_judge(self.artifact.path / ADAPTER_FOLDER, self.artifact.options, "kbm", self.llm)

    @property
    def head(self) -> str:
        """The field of the judge's JSON answer that is read: 'mastery' or 'certainty'."""
        return str(self.artifact.options["head"])

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the uncalibrated need for retrieval as 1 - P(True)."""
        return 1 - compute_kbm_confidence(
            self.judge, self.head, [render_kbm_prompt(self.judge, item) for item in questions]
        )

    @property
    def passage_filter(self) -> Self:
        """This gate as a filter for useless passages: its method `are_useful` finds them.

        Raises:
            BadSetting: The judge (the model that the gate asks) was trained without passages.
        """
        self._check_passage_training()
        return self

    def are_useful(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[bool]:
        """Return whether the passages of each question are worth keeping.

        By default, passages are useless if the judge's P(True) is lower with the passages than without. With the
        verdict 'own' (the rule of the paper), passages are useless if P(True) is below 0.5.

        Raises:
            BadSetting: The judge was trained without passages.
        """
        self._check_passage_training()
        is_useful = np.zeros(len(questions), dtype=bool)
        rows = [row for row, items in enumerate(passages) if items]  # the questions that have passages
        if rows:
            is_useful[rows] = self._compare_confidence([(questions[row], passages[row]) for row in rows])
        return is_useful.tolist()

    def _compare_confidence(self, pairs: Sequence[tuple[Question, Sequence[Passage]]]) -> BoolArray:
        """Return for each question whether the judge is at least as confident with the passages as without.

        With the verdict 'own' (the rule of the paper), the confidence must reach a fixed limit instead.
        """
        max_tokens = int(self.artifact.options["max_tokens"])
        prompts = [render_kbm_prompt(self.judge, question, passages, max_tokens) for question, passages in pairs]
        confidence = compute_kbm_confidence(self.judge, self.head, prompts)
        if self.verdict == "own":
            return np.asarray(confidence >= SUFFICIENT_CONFIDENCE)
        prompts_without_passages = [render_kbm_prompt(self.judge, question) for question, _ in pairs]
        return np.asarray(confidence >= compute_kbm_confidence(self.judge, self.head, prompts_without_passages))

    def _check_passage_training(self) -> None:
        """Raise BadSetting if the judge was trained without passages.

        Gate folders of earlier versions do not record how the judge was trained. They are accepted.
        """
        if not self.artifact.options.get(PASSAGE_EXAMPLES, 1):
            raise BadSetting(
                f"the judge '{self.artifact.path.name}' was trained without passages, so it cannot filter them. Run `knowgate "
                "label` with `index`, samples=30 and open_samples=30. Then fit gate 'kbm' again."
            )


def compute_kbm_confidence(judge: CausalJudge, head: str, prompts: Sequence[str]) -> FloatArray:
    """Return for each prompt how probably the judge says True in a field of its JSON answer.

    The answer looks like {"mastery": "True", "certainty": "False"}. `head` is the field to read.
    """
    mastery = judge.predict_known([judge.encode(prompt, MASTERY_START) for prompt in prompts])
    if head == "mastery":
        return mastery
    # The judge predicts 'certainty' after 'mastery', so the more probable label of 'mastery' is filled in first.
    true_label, false_label = KBM_LABELS
    labels = [true_label if probability >= 0.5 else false_label for probability in mastery]
    answers = [encode_kbm_answer(judge, prompt, label) for prompt, label in zip(prompts, labels, strict=True)]
    return judge.predict_known(answers)


def encode_kbm_answer(judge: CausalJudge, prompt: str, mastery: str) -> LabelPromptTokens:
    """Tokenize a prompt and the start of the judge's JSON answer, such as {"mastery": "True", "certainty": "

    Args:
        judge: The judge, whose tokenizer is used.
        prompt: The prompt.
        mastery: Value of the first field: 'True' or 'False'.
    """
    return judge.encode(prompt, MASTERY_START, mastery + CERTAINTY_START)


def render_kbm_prompt(
    judge: CausalJudge, question: Question, passages: Sequence[Passage] = (), max_tokens: int = 0
) -> str:
    """Build a prompt with as many passages as fit.

    Passages are dropped from the end. If not even the first passage fits, it is halved until it does.

    Args:
        judge: The judge, whose tokenizer counts the tokens.
        question: The question. Only the start of a long question is kept.
        passages: The passages, best first.
        max_tokens: Maximum length of a prompt with passages. With the default of 0, no passage fits.
    """
    question = judge.shorten(question)
    limit = min(max_tokens, judge.model.context_window - 1)
    remaining = list(passages)
    while remaining and _count_tokens(judge, build_kbm_prompt(question, remaining)) > limit:
        last = remaining.pop()
        if not remaining and len(last.text) > 1:
            remaining = [replace(last, text=last.text[: len(last.text) // 2])]
    return build_kbm_prompt(question, remaining)


def _count_tokens(judge: CausalJudge, prompt: str) -> int:
    """Count the tokens of a prompt and the start of the judge's JSON answer."""
    answer = judge.model.tokenize(MASTERY_START + KBM_LABELS[1] + CERTAINTY_START)
    return len(judge.model.tokenize(judge.model.render(prompt), special=True)) + len(answer)
