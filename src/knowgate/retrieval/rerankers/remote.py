"""Rerankers that run on an HTTP server.

`api:MODEL@URL` is a server with the rerank API of Cohere, Jina and others. `tei:URL` is a server of Hugging Face's
text-embeddings-inference. The API key is read from the environment variable KNOWGATE_RERANK_KEY.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from knowgate.core import split_batches
from knowgate.core.files import sha256_text
from knowgate.core.http_client import JsonClient, read_key_header
from knowgate.core.redaction import redact_urls
from knowgate.core.registry import parse_server_spec
from knowgate.core.text import replace_surrogates
from knowgate.errors import RejectionError
from knowgate.retrieval.passages import check_passage_lists, cut_query, format_passage
from knowgate.types import Passage

RERANK_KEY_VARIABLE = "KNOWGATE_RERANK_KEY"


class RemoteReranker:
    """A reranker on a server with the rerank API of Cohere and Jina.

    Lost connections and overloaded servers are retried.

    Args:
        spec: `MODEL@URL`.
        deadline: The time limit for a question in seconds, including retries.
        pause: The time before the first retry in seconds.
        options: Other options of `JsonClient`.

    Raises:
        BadSetting: The spec has another form, or its URL contains a login.
    """

    SCORE_FIELD = "relevance_score"  # of a result

    def __init__(self, spec: str, *, deadline: float = 60.0, pause: float = 0.5, **options: Any):
        self.model, self._url = parse_server_spec(spec, "api:MODEL@URL", RERANK_KEY_VARIABLE)
        name = f"the rerank server of '{self.model}'"
        options |= {"headers": read_key_header(RERANK_KEY_VARIABLE), "deadline": deadline, "pause": pause}
        advice = f"Check the URL, the model and {RERANK_KEY_VARIABLE}."
        self._server = JsonClient(self._url, name, advice=advice, **options)

    @property
    def name(self) -> str:
        return f"api:{self.model}@{redact_urls(self._url)}"

    @property
    def fingerprint(self) -> str:
        """A hash of the model name and the address, because a client cannot see which weights a server runs."""
        return sha256_text(f"api:{self.model}@{self._url}")[:16]

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """Return one score for each passage of each question.

        Args:
            questions: The questions.
            passages: A list of passages for each question.
        """
        check_passage_lists(questions, passages)
        return self._server.map(lambda i: self._score_passages(questions[i], passages[i]), range(len(questions)))

    def _score_passages(self, question: str, passages: Sequence[Passage]) -> list[float]:
        """Return the scores of the passages of one question, in order."""
        if not passages:
            return []
        query = replace_surrogates(cut_query(question))
        texts = [replace_surrogates(format_passage(passage)) for passage in passages]
        response = self._server.request_json("POST", self._url, body=self._make_body(query, texts))
        return self._parse_scores(response, len(passages))

    def _make_body(self, query: str, texts: list[str]) -> dict[str, Any]:
        """Return the JSON body of a request."""
        return {"model": self.model, "query": query, "documents": texts}

    def _parse_scores(self, response: Any, n: int) -> list[float]:
        """Return the n scores of a response in the order of the request."""
        try:
            scores = {item["index"]: item[self.SCORE_FIELD] for item in self._get_results(response)}
            return [scores[index] + 0.0 for index in range(n)]  # a score that is not a number raises TypeError
        except (KeyError, TypeError):
            raise RejectionError(
                f"{self._server.name} did not return one score for each of {n} documents. Check the URL and the model."
            ) from None

    def _get_results(self, response: Any) -> Any:
        """Return the results in a response. Each has the `index` of a document in the request, and its score."""
        return response["results"]


class TeiReranker(RemoteReranker):
    """A reranker on a server of Hugging Face's text-embeddings-inference, which runs a single model.

    Args:
        spec: The URL, which ends in `/rerank`.
        options: Keyword arguments of `RemoteReranker`, such as `deadline`.
    """

    SCORE_FIELD = "score"
    MAX_BATCH_SIZE = 32  # maximum texts per request, the default limit of the server

    def __init__(self, spec: str, **options: Any):
        super().__init__(f"tei@{spec}", **options)

    @property
    def name(self) -> str:
        return f"tei:{redact_urls(self._url)}"

    def _score_passages(self, question: str, passages: Sequence[Passage]) -> list[float]:
        """Return the scores of the passages of one question, in order. Long lists are sent in several requests."""
        scores: list[float] = []
        for batch in split_batches(passages, self.MAX_BATCH_SIZE):
            scores += super()._score_passages(question, batch)
        return scores

    def _make_body(self, query: str, texts: list[str]) -> dict[str, Any]:
        return {"query": query, "texts": texts, "truncate": True}

    def _get_results(self, response: Any) -> Any:
        return response
