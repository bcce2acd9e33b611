"""A retriever in one file: the lines of a text file that share the most words with the question."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from knowgate.errors import BadInput
from knowgate.retrieval.passages import check_k
from knowgate.types import Passage


class LinesRetriever:
    """Searches `file`; every line is a passage. The fingerprint changes when the file does."""

    def __init__(self, file: str):
        if not Path(file).is_file():
            raise BadInput(f"there is no file '{file}' to search.")
        text = Path(file).read_text(encoding="utf-8")
        self.name = "lines"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self._lines = [line.strip() for line in text.splitlines() if line.strip()]

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        wanted = _words(query)
        scored = [(len(wanted & _words(line)), number) for number, line in enumerate(self._lines)]
        best = sorted((item for item in scored if item[0]), key=lambda item: (-item[0], item[1]))[:k]
        return [Passage(f"line {number + 1}", self._lines[number], score=float(shared)) for shared, number in best]


def _words(text: str) -> set[str]:
    return {word.strip(".,;:?!").lower() for word in text.split()}
