"""KBM, the knowledge boundary model: a judge that says whether the LLM masters a question and how certain it is."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from knowgate.core.schema import read_record
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.networks import Floats, TensorValidator
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.judges.causal_judge import ADAPTER_FOLDER, CausalJudge, JudgeOptions, load_judge
from knowgate.models.prompts.judges import build_kbm_prompt
from knowgate.types import Passage, Question, Reading

if TYPE_CHECKING:
    from knowgate.models.tokenization import LabelPromptTokens

KBM_LABELS = ("True", "False")
KBM_HEADS = ("mastery", "certainty")
MASTERY_START, CERTAINTY_START = '{"mastery": "', '", "certainty": "'
PASSAGE_EXAMPLES = "passage_lessons"  # the option that says how many passages it was trained with
USEFUL_CONFIDENCE = 0.5  # the judge's own decision: the calibration is that of bare questions


@dataclass(frozen=True, kw_only=True)
class KbmOptions(JudgeOptions):
    head: Literal["mastery", "certainty"]


@dataclass(frozen=True)
class KbmGate(FittedGate):
    """need = 1 - P(True) / (P(True) + P(False)) for mastery or certainty, read off the judge's JSON.

    Its labels are mastery or certainty of at least tau. The paper's decision, True or False as the judge has it, is
    `DIR,verdict=own`: there the two heads say different things. The calibrated need is the probability that the LLM's
    answer is wrong, as that of every gate of knowing, so that thresholds and tables of gates can be compared.

    As second look it drops passages with which the question still cannot be answered; a judge must have been fitted
    with passages for it.

    Needs: nothing of the LLM. Cost per question: one prefill of the judge (90 tokens); two for certainty, which stands
    behind the more probable mastery.
    Reference: Zhang et al. (KBM), sections 4, 5.3 and 5.4, Figure 14.
    Example:
        >>> gate = KbmGate.load("my-kbm")  # doctest: +SKIP
    """

    def check(self, tensors: TensorValidator) -> None:
        read_record(KbmOptions, self.artifact.options, "options", ignore_unknown=True)
        tensors.finish()

    @functools.cached_property
    def judge(self) -> CausalJudge:
        return load_judge(self.artifact.path / ADAPTER_FOLDER, self.artifact.options, "kbm", self.llm)

    @property
    def head(self) -> str:
        return str(self.artifact.options["head"])

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        return 1 - compute_kbm_confidence(self.judge, self.head, [build_kbm_prompt(question) for question in questions])

    @property
    def passage_filter(self) -> Self:
        self._check_taught()
        return self

    def are_useful(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[bool]:
        """Whether each question can be answered with its passages; none are of no use."""
        self._check_taught()
        limit = int(self.artifact.options["max_tokens"])
        pairs = list(zip(questions, passages, strict=True))
        texts = [render_kbm_prompt(self.judge, question, shown, limit) for question, shown in pairs if shown]
        confidences = iter(compute_kbm_confidence(self.judge, self.head, texts).tolist() if texts else [])
        return [bool(shown) and next(confidences) >= USEFUL_CONFIDENCE for _, shown in pairs]

    def _check_taught(self) -> None:
        """Refuse a judge of bare questions; of one that was fitted before this was kept nobody knows."""
        if self.artifact.options.get(PASSAGE_EXAMPLES, 1):
            return
        raise BadSetting(
            f"the judge '{self.artifact.path.name}' never saw a passage in training, so it cannot say whether passages "
            "are of use. Label with passages and sampled open-book answers (knowgate label --samples 30 "
            "--open-samples 30), then: knowgate fit kbm --labels RUN --out DIR"
        )


def compute_kbm_confidence(judge: CausalJudge, head: str, texts: Sequence[str]) -> Floats:
    """P(True) / (P(True) + P(False)) of a head; certainty is read behind the more probable mastery."""
    mastery = judge.known([judge.encode(text, MASTERY_START) for text in texts])
    if head == "mastery":
        return mastery
    words = [KBM_LABELS[0] if probability >= 0.5 else KBM_LABELS[1] for probability in mastery]
    return judge.known([encode_kbm_answer(judge, text, word) for text, word in zip(texts, words, strict=True)])


def encode_kbm_answer(judge: CausalJudge, text: str, mastery: str) -> LabelPromptTokens:
    """The judge's answer up to where certainty stands; both labels are marked."""
    return judge.encode(text, MASTERY_START, mastery + CERTAINTY_START)


def render_kbm_prompt(judge: CausalJudge, question: Question, passages: Sequence[Passage], limit: int) -> str:
    """The prompt with as many passages as the limit holds, cut from the end; the last one left is halved."""
    room = min(limit, judge.model.window - 1)
    kept = list(passages)
    while kept and _length(judge, build_kbm_prompt(question, kept)) > room:
        if len(kept) > 1:
            kept.pop()
        elif len(kept[0].text) > 1:
            kept[0] = replace(kept[0], text=kept[0].text[: len(kept[0].text) // 2])
        else:
            kept.pop()
    return build_kbm_prompt(question, kept)


def _length(judge: CausalJudge, text: str) -> int:
    answer = judge.model.tokenize(MASTERY_START + KBM_LABELS[1] + CERTAINTY_START)
    return len(judge.model.tokenize(judge.model.render(text), special=True)) + len(answer)
