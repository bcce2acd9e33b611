"""Answers and decisions as JSON records: what `knowgate ask --json` prints and servers return."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.question_state import is_complete_draft
from knowgate.types import Answer, ArbiterChoice, Decision, Passage, TokenizingModel


def answer_record(answer: Answer, rag: AdaptiveRAG) -> dict[str, Any]:
    """Convert an answer to plain data for JSON. Fields without a value, such as `id`, are left out.

    Args:
        answer: The answer.
        rag: The pipeline that gave it.
    """
    return {
        **({"id": answer.question.id} if answer.question.id else {}),
        "question": answer.question.text,
        **({"asked": answer.question.meta["asked"]} if "asked" in answer.question.meta else {}),
        "answer": answer.text,
        **({} if answer.finished else {"finished": False}),
        **decision_record(answer.decision),
        "model": rag.model.name,
        "passages": [_passage_record(passage) for passage in answer.passages],
        **_timing_record(answer),
        "tokens": {
            "draft": answer.draft.n_tokens if answer.draft else 0,
            "answer": answer.n_tokens,
            **_count_prompt_tokens(answer, rag),
        },
        **_draft_record(answer, rag.max_tokens),
        **_choice_record(answer.choice),
    }


def decision_record(decision: Decision) -> dict[str, Any]:
    """Convert a decision to plain data for JSON. Fields without a value, such as `rule`, are left out."""
    return {
        "retrieve": decision.retrieve,
        "need": round(decision.need, 6),
        **({} if decision.raw is None else {"raw": round(decision.raw, 6)}),
        "threshold": decision.threshold,
        "gate": decision.gate,
        "reason": decision.reason,
        **({"rule": decision.rule} if decision.rule else {}),
        "notes": list(decision.notes),
        **({"distance": round(decision.distance, 4)} if decision.distance is not None else {}),
        **({"neighbours": [asdict(neighbor) for neighbor in decision.neighbors]} if decision.neighbors else {}),
    }


def _passage_record(passage: Passage) -> dict[str, Any]:
    return {"id": passage.id, "title": passage.title, "text": passage.text, "score": passage.score}


def _timing_record(answer: Answer) -> dict[str, Any]:
    """Return the seconds of each stage. In a batch they are not known per question, so return the batch size."""
    if answer.batch_size == 1:
        return {"seconds": {stage: round(value, 4) for stage, value in answer.seconds.items()}}
    return {"batch": answer.batch_size}


def _count_prompt_tokens(answer: Answer, rag: AdaptiveRAG) -> dict[str, int]:
    """Count the tokens of the prompts, without those of a chat template. Empty if the model has no tokenizer."""
    if not isinstance(rag.model, TokenizingModel):
        return {}
    prompts = {"closed_prompt": rag.prompts.closed(answer.question)}
    if answer.passages:
        prompts["open_prompt"] = rag.prompts.open(answer.question, answer.passages)
    return {name: len(rag.model.tokenize(prompt.text)) for name, prompt in prompts.items()}


def _draft_record(answer: Answer, max_tokens: int) -> dict[str, Any]:
    """Return the complete answer without passages that the open-book answer replaced; empty if there is none.

    `knowgate replay` reads it.
    """
    draft = answer.draft
    if not answer.passages or draft is None or not is_complete_draft(draft, max_tokens):
        return {}
    return {"draft": draft.text}


def _choice_record(choice: ArbiterChoice | None) -> dict[str, Any]:
    """Return which of two answers the arbiter gave and why; empty without an arbiter.

    The answers are the draft (from memory) and the one from the passages. `believed` holds the probabilities that each
    of them is right, if the arbiter estimated them.
    """
    if choice is None:
        return {}
    record: dict[str, Any] = {
        "given": "draft" if choice.is_closed_book else "passages",
        "arbiter": choice.arbiter,
        "reason": choice.reason,
        "open_answer": choice.open,
    }
    if choice.closed_probability is not None and choice.open_probability is not None:
        beliefs = {"draft": choice.closed_probability, "passages": choice.open_probability}
        record["believed"] = {name: round(probability, 6) for name, probability in beliefs.items()}
    return {"choice": record}
