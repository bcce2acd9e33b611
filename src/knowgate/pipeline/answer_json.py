"""Answers and decisions as JSON records: what `knowgate ask --json` prints and servers return."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.question_state import is_complete_draft
from knowgate.types import Answer, ArbiterChoice, Decision, TokenizingModel


def answer_record(answer: Answer, rag: AdaptiveRAG) -> dict[str, Any]:
    """Convert an answer to plain data for JSON. Fields without a value, such as `id`, are left out.

    Args:
        answer: The answer.
        rag: The pipeline that gave it.
    """
    record = {
        "id": answer.question.id or None,
        "question": answer.question.text,
        "asked": answer.question.meta.get("asked"),
        "answer": answer.text,
        "finished": None if answer.finished else False,
        **decision_record(answer.decision),
        "model": rag.model.name,
        "passages": [asdict(passage) for passage in answer.passages],
        **_timing_record(answer),
        "tokens": {
            "draft": answer.draft.n_tokens if answer.draft else 0,
            "answer": answer.n_tokens,
            **_count_prompt_tokens(answer, rag),
        },
        "draft": get_complete_draft(answer, rag.max_tokens),
        "choice": None if answer.choice is None else _choice_record(answer.choice),
    }
    return {name: value for name, value in record.items() if value is not None}


def decision_record(decision: Decision) -> dict[str, Any]:
    """Convert a decision to plain data for JSON. `need` is the gate's score, `raw` the score before calibration."""
    record = {
        "retrieve": decision.retrieve,
        "need": round(decision.need, 6),
        "raw": None if decision.raw is None else round(decision.raw, 6),
        "threshold": decision.threshold,
        "gate": decision.gate,
        "reason": decision.reason,
        "rule": decision.rule or None,
        "notes": list(decision.notes),
        "distance": None if decision.distance is None else round(decision.distance, 4),
        "neighbours": [asdict(neighbor) for neighbor in decision.neighbors] or None,
    }
    return {name: value for name, value in record.items() if value is not None}


def _timing_record(answer: Answer) -> dict[str, Any]:
    """Return the seconds of each stage. Questions of a batch share time, so only its size is returned."""
    if answer.batch_size == 1:
        return {"seconds": {stage: round(value, 4) for stage, value in answer.seconds.items()}}
    return {"batch": answer.batch_size}


def _count_prompt_tokens(answer: Answer, rag: AdaptiveRAG) -> dict[str, int]:
    """Count the tokens of the prompts without (closed) and with passages (open). Empty without a tokenizer."""
    if not isinstance(rag.model, TokenizingModel):
        return {}
    prompts = {"closed_prompt": rag.prompts.closed(answer.question)}
    if answer.passages:
        prompts["open_prompt"] = rag.prompts.open(answer.question, answer.passages)
    return {name: len(rag.model.tokenize(prompt.text)) for name, prompt in prompts.items()}


def get_complete_draft(answer: Answer, max_tokens: int) -> str | None:
    """Return the complete draft (answer without passages), if passages were also used."""
    draft = answer.draft
    if answer.passages and draft is not None and is_complete_draft(draft, max_tokens):
        return draft.text
    return None


def _choice_record(choice: ArbiterChoice) -> dict[str, Any]:
    """Convert an arbiter's choice between two answers to plain data.

    The draft is the answer without passages. `believed` holds the probability that each answer is right.
    """
    record: dict[str, Any] = {
        "given": "draft" if choice.is_closed_book else "passages",
        "arbiter": choice.arbiter,
        "reason": choice.reason,
        "open_answer": choice.open,
    }
    if choice.closed_probability is not None and choice.open_probability is not None:
        record["believed"] = {
            "draft": round(choice.closed_probability, 6),
            "passages": round(choice.open_probability, 6),
        }
    return record
