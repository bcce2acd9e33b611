"""Orders the documents of POST /v1/rerank by relevance."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from knowgate.retrieval.rerankers import rerank
from knowgate.server.chat.gate_service import GateService, describe_error
from knowgate.server.json_api import ApiError
from knowgate.server.schemas import RerankRequest, RerankResponse
from knowgate.types import Passage, Reranker

log = logging.getLogger(__name__)

BATCH_DOCUMENTS = 32  # after as many documents, waiting searches run
MAX_DOCUMENT_CHARS = 50_000  # rerankers read less of a document, so the rest is not passed on


async def rerank_documents(
    gate_service: GateService, reranker: Reranker, request: RerankRequest, id: str
) -> RerankResponse:
    """Order the documents of a request by relevance to its query, and keep the best `top_n` if that is set.

    Searches use the same reranker. They get their turn after each batch of documents, and only one request is reranked
    at a time, so that large requests do not delay searches for long.

    Raises:
        ApiError: 503 if the reranker fails or takes too long.
    """
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    passages = [Passage(str(index), text[:MAX_DOCUMENT_CHARS]) for index, text in enumerate(texts)]
    ranked: list[Passage] = []
    try:
        async with asyncio.timeout(gate_service.timeout), gate_service.rerank_lock:
            for start in range(0, len(passages), BATCH_DOCUMENTS):
                batch = passages[start : start + BATCH_DOCUMENTS]
                work = partial(rerank, reranker, [request.query], [batch], len(batch))
                ranked += (await gate_service.run_in_search_thread(work))[0]
    except Exception as error:  # noqa: BLE001 - whatever the reranker raises, the client gets a sentence
        log.warning("The reranker failed: %s", describe_error(error, gate_service.timeout))
        message = "the reranker failed or took too long. Send fewer or shorter documents, or try again later."
        raise ApiError(503, message, "reranker_down") from None
    ranked.sort(key=lambda passage: (-(passage.score or 0.0), int(passage.id)))
    results = [
        {
            "index": int(passage.id),
            "relevance_score": passage.score,
            **({"document": {"text": texts[int(passage.id)]}} if request.return_documents else {}),
        }
        for passage in ranked[: request.top_n]
    ]
    return RerankResponse.model_validate({"id": id, "model": reranker.name, "results": results})
