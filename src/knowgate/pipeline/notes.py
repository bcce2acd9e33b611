"""The facts noted on a question's way, in words. Programs read `Decision.notes`; people read `Decision.reason`."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.types import Note

WORDS = {
    Note.NOTHING_FOUND: "nothing was found",
    Note.PASSAGES_USELESS: "the passages were judged useless",
    Note.NO_PASSAGE_FITS: "no passage fits the context window",
    Note.NOT_RERANKED: "not reranked, the retriever is sure",
    Note.DRAFT_GIVEN: "the answer from memory was given",
    Note.LABELS_UNLISTED: "nothing tells the gate's labels apart, as none of them is among the tokens that are listed",
    Note.WOULD_SKIP: "the gate would have skipped",
}


def in_words(notes: Sequence[Note]) -> list[str]:
    """Each fact once, in the order they came up."""
    return [_words(note, notes.count(note)) for note in dict.fromkeys(notes)]


def _words(note: Note, times: int) -> str:
    return f"{1 + times} rounds of retrieval" if note is Note.RETRIEVED_AGAIN else WORDS[note]
