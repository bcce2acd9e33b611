"""Judges: small fine-tuned models that read a question and the LLM's answer and predict whether the answer is right.

A judge is a causal language model (`causal_judge`), run by transformers or llama.cpp, or a small encoder
(`encoder_judge`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

from knowgate.core.schema import NumberRange, read_record
from knowgate.core.text import render_choices
from knowgate.gates.judges import causal_judge
from knowgate.gates.judges.encoder_judge import load_encoder_judge
from knowgate.models.prompts.questions import build_correctness_prompt, build_ik_prompt, build_search_correctness_prompt
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.stats.metrics import FloatArray
from knowgate.types import ModelIdentity, Question

ANSWER_LABELS = ("Yes", "No")


class AnswerPrompt(NamedTuple):
    """A prompt that asks a judge about the LLM's answer to a question.

    Attributes:
        templates: Name of the prompt templates.
        build: Builds the prompt from a question and an answer. Without an answer, the judge sees the question only.
        encoder_suffix: Text that is appended to the answer for encoders. They read question and answer instead of a
            prompt, so this text tells them what is asked.
    """

    templates: str
    build: Callable[[Question, str | None], str]
    encoder_suffix: str = ""


# 'ik' asks whether the LLM can answer the question, given the start of its answer. 'judge' asks whether the LLM's
# answer is right. 'search' asks whether an answer from documents would be right.
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
class AnswerJudgeOptions(causal_judge.JudgeOptions):
    """Options of a judge in `gate.json`. The judge reads `tokens` tokens of the LLM's answer."""

    tokens: Annotated[int, NumberRange(0, 1_000_000)]


class AnswerJudge(Protocol):
    """A model for predicting whether the LLM's answer is right.

    Causal judges read a prompt. Encoder judges read question and answer as a pair.
    """

    def encode_answer(self, question: str, answer: str | None, text: str) -> LabelPromptTokens:
        """Tokenize the input of the judge.

        Args:
            question: The question. Only encoders use it.
            answer: The LLM's answer; None if the judge reads the question alone. Only encoders use it.
            text: A prompt that contains both. Only causal models use it.
        """

    def truncate(self, text: str, n_tokens: int) -> str:
        """Return the start of a text, cut after `n_tokens` tokens of the judge."""

    def shorten(self, question: Question) -> Question:
        """Return the question, cut to a maximum number of tokens."""

    def predict_known(self, prompts: Sequence[LabelPromptTokens]) -> FloatArray:
        """Return the probability that the LLM knows the answer, averaged over the members of the ensemble."""


def load_answer_judge(
    prompt_name: str, gate_folder: Path, options: Mapping[str, Any], llm: ModelIdentity | None = None
) -> AnswerJudge:
    """Load the judge model of a fitted gate.

    Args:
        prompt_name: The prompt that it was trained with, a key of `ANSWER_PROMPTS`.
        gate_folder: Folder of the gate.
        options: Options of the gate, which say what kind of judge it is.
        llm: The LLM that is judged. The judge shares its weights if it was fine-tuned from the same model.

    Raises:
        ArtifactError: The files of the judge were changed or damaged.
    """
    folder = gate_folder / causal_judge.ADAPTER_FOLDER
    if options.get("pairs"):
        return load_encoder_judge(*causal_judge.check_adapters(folder, options))
    if options.get("gguf"):
        gguf = read_record(causal_judge.GgufOptions, options["gguf"], "options.gguf", ignore_unknown=True)
        return causal_judge.load_llama_judge(*causal_judge.check_adapters(folder, options), gguf)
    return causal_judge.load_judge(folder, options, ANSWER_PROMPTS[prompt_name].templates, llm)


def encode_answers(
    prompt_name: str, judge: AnswerJudge, questions: Sequence[Question], texts: Sequence[str], tokens: int
) -> list[LabelPromptTokens]:
    """Tokenize questions and the LLM's answers as input for a judge.

    Args:
        prompt_name: What to ask the judge, a key of `ANSWER_PROMPTS`.
        judge: The judge.
        questions: The questions. Long ones are cut.
        texts: The LLM's answers.
        tokens: How many tokens of each answer the judge reads; with 0 it reads the question only.
    """
    prompt = ANSWER_PROMPTS[prompt_name]
    encoded = []
    for question, text in zip(map(judge.shorten, questions), texts, strict=True):
        answer = judge.truncate(text, tokens) if tokens else None
        encoder_answer = None if answer is None else answer + prompt.encoder_suffix
        # Encoder judges read the question and the answer as a pair, causal judges read the prompt that contains both.
        encoded.append(judge.encode_answer(render_choices(question), encoder_answer, prompt.build(question, answer)))
    return encoded


def compute_gain_needs(known: FloatArray, document_right: FloatArray) -> FloatArray:
    """Compute the need for retrieval from the expected gain. The gain is mapped from [-1, 1] to [0, 1].

    Args:
        known: Probability that the LLM's answer is right.
        document_right: Probability that an answer from documents would be right.
    """
    return (document_right - known + 1) / 2
