"""What gates with a judge of answers share: the question it is asked, and what it reads of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

from knowgate.core.schema import NumberRange
from knowgate.core.text import render_choices
from knowgate.gates.artifacts.networks import Floats
from knowgate.gates.judges.causal_judge import (
    ADAPTER_FOLDER,
    JudgeOptions,
    check_adapters,
    load_judge,
    load_llama_judge,
)
from knowgate.gates.judges.encoder_judge import load_encoder_judge
from knowgate.models.prompts.judges import build_correctness_prompt, build_ik_prompt, build_search_correctness_prompt
from knowgate.types import ModelIdentity, Question

if TYPE_CHECKING:
    from knowgate.models.tokenization import LabelPromptTokens

ANSWER_LABELS = ("Yes", "No")


class AnswerPrompt(NamedTuple):
    """The set of templates a judge of answers is asked with, and the text; no answer: the question alone.

    behind: what an encoder, which is not spoken to, reads behind the answer.
    """

    templates: str
    text: Callable[[Question, str | None], str]
    behind: str = ""


# IK is asked whether the LLM can answer, given how its answer begins; the judge whether the answer is right, and, to
# foresee what a search would gain, whether one found in documents would be
ANSWER_PROMPTS: Mapping[str, AnswerPrompt] = {
    "ik": AnswerPrompt("ik", lambda question, answer: build_ik_prompt(question, answer or "")),
    "judge": AnswerPrompt("right", build_correctness_prompt),
    "search": AnswerPrompt(
        "right",
        lambda question, answer: build_search_correctness_prompt(question, answer or ""),
        "; what would documents say?",
    ),
}


@dataclass(frozen=True, kw_only=True)
class AnswerJudgeOptions(JudgeOptions):
    """tokens: of the answer it reads."""

    tokens: Annotated[int, NumberRange(0, 1_000_000)]


class AnswerJudge(Protocol):
    """What judges of answers have in common: a causal model that is asked, an encoder that reads a pair."""

    def pose(self, question: str, answer: str | None, text: str) -> LabelPromptTokens:
        """What it reads: of question and answer as they are, or of both worded as a text."""
        ...

    def beginning(self, text: str, n_tokens: int) -> str: ...

    def votes(self, cuts: Sequence[LabelPromptTokens]) -> list[Floats]: ...

    def known(self, cuts: Sequence[LabelPromptTokens]) -> Floats: ...


def load_answer_judge(
    asked: str, artifact: Path, options: Mapping[str, Any], llm: ModelIdentity | None = None
) -> AnswerJudge:
    """The judge of a gate's folder. llm: who is judged, whose weights it may share."""
    if options.get("pairs"):
        return load_encoder_judge(*check_adapters(artifact / ADAPTER_FOLDER, options))
    if options.get("gguf"):
        return load_llama_judge(*check_adapters(artifact / ADAPTER_FOLDER, options), options["gguf"])
    return load_judge(artifact / ADAPTER_FOLDER, options, ANSWER_PROMPTS[asked].templates, llm)


def score_answers(
    gate: str, judge: AnswerJudge, questions: Sequence[Question], texts: Sequence[str], tokens: int
) -> Floats:
    """Uncalibrated needs of questions and answers."""
    return 1 - judge.known(encode_answers(gate, judge, questions, texts, tokens))


def compute_gain_needs(known: Floats, found: Floats) -> Floats:
    """What a search is expected to gain, from 0 (memory is right, documents are wrong) to 1."""
    return (found - known + 1) / 2


def encode_answers(
    asked: str, judge: AnswerJudge, questions: Sequence[Question], texts: Sequence[str], tokens: int
) -> list[LabelPromptTokens]:
    """What the judge reads where this is asked: the question, and so many tokens of the answer (0: no answer)."""
    prompt, found = ANSWER_PROMPTS[asked], []
    for question, text in zip(questions, texts, strict=True):
        answer = judge.beginning(text, tokens) if tokens else None
        pair = None if answer is None else answer + prompt.behind
        found.append(judge.pose(render_choices(question), pair, prompt.text(question, answer)))
    return found
