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
from knowgate.stats.metrics import FloatArray
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
    """Options of a KBM judge in `gate.json`.

    The judge answers with JSON: 'mastery' is whether the LLM's sampled answers are right, 'certainty' whether they
    agree. `head` is the field that the gate reads.
    """

    head: Literal["mastery", "certainty"]


@dataclass(frozen=True)
class KbmGate(FittedGate):
    """Asks a fine-tuned judge model, which sees only the question, whether the LLM masters it or is certain about it.

    Mastery is the share of the LLM's sampled answers that are right, certainty how far they agree. In training, the
    judge learns whether this value is at least tau. It answers in JSON with True or False, and the uncalibrated need
    for retrieval is 1 - P(True) / (P(True) + P(False)). The calibrated need is the probability that the LLM's answer is
    wrong, so that thresholds are comparable between gates. The spec `DIR,verdict=own` decides as the paper does, by the
    more probable label.

    A judge that was trained with passages can also filter them after retrieval. It drops passages only if it expects the
    LLM to do worse with them than without. The spec `DIR,verdict=own` filters as the paper does: it drops the passages of
    questions that it expects the LLM to answer wrong even with them, which costs right answers where the LLM knows
    little.

    Needs: nothing of the LLM. Cost per question: one prefill of the judge (90 tokens) for mastery, two for certainty.
    Reference: Zhang et al. (KBM), sections 4, 5.3 and 5.4, Figure 14.

    Example:
        >>> gate = KbmGate.load("my-kbm")  # doctest: +SKIP
    """

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the options of the judge are wrong or the folder holds unknown tensors."""
        read_record(KbmOptions, self.artifact.options, "options", ignore_unknown=True)
        tensors.reject_others()

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
        return 1 - compute_kbm_confidence(self.judge, self.head, [build_kbm_prompt(item) for item in questions])

    @property
    def passage_filter(self) -> Self:
        """The object that drops useless passages after retrieval. It is this gate, which has the method `are_useful`.

        Raises:
            BadSetting: The judge, the model that the gate asks, was trained without passages, so it cannot filter them.
        """
        self._check_passage_training()
        return self

    def are_useful(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[bool]:
        """Return whether the passages of each question are worth keeping; False for questions without passages.

        Passages are kept if the judge's confidence, P(True), is at least as high with them as without them. If the gate
        decides by its raw score (verdict 'own'), they are kept if P(True) is at least 0.5.

        Raises:
            BadSetting: The judge was trained without passages.
        """
        self._check_passage_training()
        max_tokens = int(self.artifact.options["max_tokens"])
        is_useful = np.zeros(len(questions), dtype=bool)
        rows = [row for row, items in enumerate(passages) if items]  # the questions that have passages
        if not rows:
            return is_useful.tolist()
        prompts = [render_kbm_prompt(self.judge, questions[row], passages[row], max_tokens) for row in rows]
        confidence = compute_kbm_confidence(self.judge, self.head, prompts)
        if self.verdict == "own":
            is_useful[rows] = confidence >= SUFFICIENT_CONFIDENCE
        else:
            prompts_without_passages = [build_kbm_prompt(questions[row]) for row in rows]
            is_useful[rows] = confidence >= compute_kbm_confidence(self.judge, self.head, prompts_without_passages)
        return is_useful.tolist()

    def _check_passage_training(self) -> None:
        """Raise BadSetting if the judge was trained without passages.

        Folders of older versions do not record this, so no error is raised for them.
        """
        if not self.artifact.options.get(PASSAGE_EXAMPLES, 1):
            raise BadSetting(
                f"the judge '{self.artifact.path.name}' was trained without passages, so it cannot filter them. Label "
                "questions with passages, samples=30 and open_samples=30. Then fit kbm again."
            )


def compute_kbm_confidence(judge: CausalJudge, head: str, prompts: Sequence[str]) -> FloatArray:
    """Return how probably the judge answers True rather than False, for each prompt.

    The judge answers in JSON with two fields, such as {"mastery": "True", "certainty": "False"}. `head` says which
    one is read. To read 'certainty', the more probable label of 'mastery' is written before it.
    """
    mastery = judge.predict_known([judge.encode(prompt, MASTERY_START) for prompt in prompts])
    if head == "mastery":
        return mastery
    true_label, false_label = KBM_LABELS
    labels = [true_label if probability >= 0.5 else false_label for probability in mastery]
    answers = [encode_kbm_answer(judge, prompt, label) for prompt, label in zip(prompts, labels, strict=True)]
    return judge.predict_known(answers)


def encode_kbm_answer(judge: CausalJudge, prompt: str, mastery: str) -> LabelPromptTokens:
    """Tokenize a prompt and the start of the judge's JSON answer: {"mastery": "True", "certainty": "

    The result also has the positions at which the labels of mastery and certainty are predicted.

    Args:
        judge: The judge, whose tokenizer is used.
        prompt: The prompt.
        mastery: The label of mastery, True or False.
    """
    return judge.encode(prompt, MASTERY_START, mastery + CERTAINTY_START)


def render_kbm_prompt(judge: CausalJudge, question: Question, passages: Sequence[Passage], max_tokens: int) -> str:
    """Build a prompt with as many passages as fit into `max_tokens`.

    Passages are dropped from the end. If a single passage is left and still too long, its text is halved until it fits.
    """
    limit = min(max_tokens, judge.model.context_window - 1)
    remaining = list(passages)
    while remaining and _count_tokens(judge, build_kbm_prompt(question, remaining)) > limit:
        last = remaining.pop()
        if not remaining and len(last.text) > 1:
            remaining = [replace(last, text=last.text[: len(last.text) // 2])]
    return build_kbm_prompt(question, remaining)


def _count_tokens(judge: CausalJudge, prompt: str) -> int:
    """Count the tokens of a prompt and of the start of the judge's answer: {"mastery": "False", "certainty": "

    False, the second label, is the longer one.
    """
    answer = judge.model.tokenize(MASTERY_START + KBM_LABELS[1] + CERTAINTY_START)
    return len(judge.model.tokenize(judge.model.render(prompt), special=True)) + len(answer)
