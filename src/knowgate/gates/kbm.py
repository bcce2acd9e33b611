"""KBM, the knowledge boundary model: a judge says whether the LLM masters a question and how certain it is."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from knowgate.core.schema import read_record
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.networks import TensorValidator
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.judges.causal_judge import ADAPTER_FOLDER, CausalJudge, JudgeOptions, load_judge
from knowgate.models.prompts.judges import build_kbm_prompt
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.stats.metrics import FloatArray
from knowgate.types import Passage, Question, Reading

KBM_LABELS = ("True", "False")
KBM_HEADS = ("mastery", "certainty")
MASTERY_START, CERTAINTY_START = '{"mastery": "', '", "certainty": "'
PASSAGE_EXAMPLES = "passage_lessons"  # the option that counts the training examples with passages
USEFUL_CONFIDENCE = 0.5  # uncalibrated, because the calibration is for questions without passages


@dataclass(frozen=True, kw_only=True)
class KbmOptions(JudgeOptions):
    """Manifest entry of a KBM judge. `head` is the JSON field whose label is read."""

    head: Literal["mastery", "certainty"]


@dataclass(frozen=True)
class KbmGate(FittedGate):
    """Asks a fine-tuned judge of the question whether the LLM has mastered it, or is certain about it.

    need = 1 - P(True) / (P(True) + P(False)) in the judge's JSON answer. The training label is whether mastery or
    certainty is at least tau. `DIR,verdict=own` is the decision of the paper, the more probable label. The calibrated
    need is the probability that the LLM's answer is wrong, so that thresholds compare with those of other gates.

    A judge that was fitted with passages can also filter them after retrieval: it drops passages with which the
    question still cannot be answered.

    Needs: nothing of the LLM. Cost per question: one prefill of the judge (90 tokens); two for certainty, which follows
    the more probable mastery label.
    Reference: Zhang et al. (KBM), sections 4, 5.3 and 5.4, Figure 14.

    Example:
        >>> gate = KbmGate.load("my-kbm")  # doctest: +SKIP
    """

    def check(self, tensors: TensorValidator) -> None:
        """Check the options of the judge."""
        read_record(KbmOptions, self.artifact.options, "options", ignore_unknown=True)
        tensors.finish()

    @functools.cached_property
    def judge(self) -> CausalJudge:
        """The judge, loaded on first use."""
        return load_judge(self.artifact.path / ADAPTER_FOLDER, self.artifact.options, "kbm", self.llm)

    @property
    def head(self) -> str:
        """The JSON field whose label is read."""
        return str(self.artifact.options["head"])

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute 1 - P(True)."""
        return 1 - compute_kbm_confidence(self.judge, self.head, [build_kbm_prompt(item) for item in questions])

    @property
    def passage_filter(self) -> Self:
        """The gate itself, which can judge passages if it was trained with them."""
        self._check_passage_training()
        return self

    def are_useful(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[bool]:
        """Return whether each question can be answered with its passages; False without passages."""
        self._check_passage_training()
        max_tokens = int(self.artifact.options["max_tokens"])
        pairs = list(zip(questions, passages, strict=True))
        prompts = [render_kbm_prompt(self.judge, question, items, max_tokens) for question, items in pairs if items]
        confidences = iter(compute_kbm_confidence(self.judge, self.head, prompts).tolist() if prompts else [])
        return [bool(items) and next(confidences) >= USEFUL_CONFIDENCE for _, items in pairs]

    def _check_passage_training(self) -> None:
        """Raise BadSetting if the judge was trained without passages; older artifacts do not say."""
        if not self.artifact.options.get(PASSAGE_EXAMPLES, 1):
            raise BadSetting(
                f"the judge '{self.artifact.path.name}' was trained without passages, so it cannot judge them. Label "
                "with passages and set `samples` and `open_samples` to 30, then fit kbm again."
            )


def compute_kbm_confidence(judge: CausalJudge, head: str, prompts: Sequence[str]) -> FloatArray:
    """Compute P(True) / (P(True) + P(False)) of a head; certainty follows the more probable mastery label."""
    mastery = judge.predict_known([judge.encode(prompt, MASTERY_START) for prompt in prompts])
    if head == "mastery":
        return mastery
    labels = [KBM_LABELS[0] if probability >= 0.5 else KBM_LABELS[1] for probability in mastery]
    return judge.predict_known(
        [encode_kbm_answer(judge, prompt, label) for prompt, label in zip(prompts, labels, strict=True)]
    )


def encode_kbm_answer(judge: CausalJudge, prompt: str, mastery: str) -> LabelPromptTokens:
    """Tokenize a prompt and the JSON answer up to the certainty label, with the positions of both labels."""
    return judge.encode(prompt, MASTERY_START, mastery + CERTAINTY_START)


def render_kbm_prompt(judge: CausalJudge, question: Question, passages: Sequence[Passage], max_tokens: int) -> str:
    """Build a prompt with as many passages as fit, dropping from the end; the last one is halved until it fits."""
    limit = min(max_tokens, judge.model.context_window - 1)
    remaining = list(passages)
    while remaining and _count_tokens(judge, build_kbm_prompt(question, remaining)) > limit:
        if len(remaining) == 1 and len(remaining[0].text) > 1:
            remaining[0] = replace(remaining[0], text=remaining[0].text[: len(remaining[0].text) // 2])
        else:
            remaining.pop()
    return build_kbm_prompt(question, remaining)


def _count_tokens(judge: CausalJudge, prompt: str) -> int:
    """Count the tokens of a prompt and its answer."""
    answer = judge.model.tokenize(MASTERY_START + KBM_LABELS[1] + CERTAINTY_START)
    return len(judge.model.tokenize(judge.model.render(prompt), special=True)) + len(answer)
