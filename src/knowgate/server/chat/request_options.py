"""Options with which a request controls the decision, in its model name (`knowgate/GATE`) or its `knowgate` object.

A request can select one of a few gates by name. For security, it can never load a gate from a path.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Any, Literal

from knowgate.core.limited_log import LimitedLog
from knowgate.errors import ArtifactError, BadInput, BrokenIndex, KnowgateError, RejectionError
from knowgate.gates import PACKAGED_GATES
from knowgate.gates.calibration.deployment import is_fitted_on_recorded
from knowgate.gates.fitted_gate import FittedGate
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.retrieval.engines.web import SearchBudgetError
from knowgate.retrieval.passages import MAX_LABEL_CHARS
from knowgate.server.json_api import ApiError, parse_request
from knowgate.server.load_limits import get_reason, run_in_thread
from knowgate.server.schemas import GatedRequest, PassageFilter
from knowgate.types import Gate, Passage, Question, Reading, Retriever

log = LimitedLog(logging.getLogger(__name__))

MODEL_PREFIX = "knowgate"
SELECTABLE_GATES = (
    "always", "never", "logprob:first", "logprob:mean", "logprob:min", "logprob:margin", "flare", "prompt"
)  # fmt: skip
DEPTH_FACTOR = 4  # factor by which the number of searched passages grows if too few match a filter
MAX_DEPTH = 1000  # maximum number of passages that are searched for matches with a filter
FINGERPRINT_SECONDS = 60.0  # maximum age of a fingerprint
RETRY_SECONDS = 5.0  # time after which a fingerprint that could not be read is read again
MAX_CACHED_PATTERN_CHARS = 1_000
FILTER_SECONDS = 0.5  # maximum processor time to compare the passages of one search with a filter

RECORDED_ADVICE = (
    "the gate was fitted on imported answers, which do not record the documents. Run `knowgate label` with this LLM and "
    "index, fit the gate on that run, and restart the server with it, or leave out `max_loss`"
)


@dataclass(frozen=True)
class RequestOptions:
    """Options that determine how the server decides on one request.

    Attributes:
        retrieve: "always", "never", or "auto" if the gate decides.
        threshold: Threshold to use instead of the gate's own.
        gate: Name of the gate that the request selects, or "" for the default gate of the server.
        max_loss: Maximum share of answers (0 to 1) that may become wrong because retrieval is skipped. If the gate does
            not guarantee that, the server always retrieves.
        filter: Restricts the search to some documents.
        arm: Gate of an A/B test that the server chose for this request: "a", "b", or "" without an A/B test.
        shadow: Reason why the server retrieves regardless of the gate's decision, or "" if it follows the gate.
        shares_labels: Whether the history may store that the LLM knew, or did not know, this question.
    """

    retrieve: Literal["auto", "always", "never"] = "auto"
    threshold: float | None = None
    gate: str = ""
    max_loss: float | None = None
    filter: PassageFilter | None = None
    arm: str = ""
    shadow: str = ""
    shares_labels: bool = True

    @property
    def is_default(self) -> bool:
        """Whether the request sets no options of its own."""
        return not self.gate_name and self.threshold is None and self.max_loss is None and self.filter is None

    @property
    def gate_name(self) -> str:
        """Name of the gate that the request selects ("always" and "never" included), or "" for the default gate."""
        return self.gate if self.retrieve == "auto" else self.retrieve


def read_request_options(body: Mapping[str, Any]) -> RequestOptions:
    """Read the options of a request from its model name and its `knowgate` object.

    Raises:
        ApiError: 400 if a field is invalid, 404 if the model name selects an unknown gate.
    """
    request = parse_request(GatedRequest, body)
    own_options = {} if request.knowgate is None else dict(request.knowgate)
    return RequestOptions(gate=_read_gate_name(request.model), **own_options)


def _read_gate_name(model: str | None) -> str:
    """Return the gate of a model name. Example: "knowgate/always" selects "always", other names give "".

    Raises:
        ApiError: 404 if a request cannot select this gate.
    """
    if model is None or not model.startswith(f"{MODEL_PREFIX}/"):
        return ""
    name = model.removeprefix(f"{MODEL_PREFIX}/")
    if name not in SELECTABLE_GATES:
        message = f"a request cannot select the gate '{name[:80]}'. GET /v1/models lists the gates that it can select."
        raise ApiError(404, message, "model_not_found")
    return name


def is_knowgate_model(model: str | None) -> bool:
    """Return whether a model name (None, knowgate or knowgate/GATE) stands for the default LLM of this server."""
    return model is None or model == MODEL_PREFIX or model.startswith(f"{MODEL_PREFIX}/")


_matching_lock = threading.Lock()  # several threads that compare at once would slow down the event loop


class FilterMatcher:
    """Comparison of passages with a filter, limited to FILTER_SECONDS. Results are cached per document."""

    def __init__(self, filter: PassageFilter):
        self._filter = filter
        self._seconds = 0.0
        self._is_match: dict[tuple[str, str], bool] = {}  # id and title of a passage -> whether it matches

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The regular expressions for the id and for the title of a passage."""
        return _compile_patterns(self._filter.id), _compile_patterns(self._filter.title)

    def matches(self, passage: Passage) -> bool:
        """Return whether a passage matches the filter.

        Raises:
            ApiError: 400 if the comparisons so far took more than FILTER_SECONDS.
        """
        key = (passage.id[:MAX_LABEL_CHARS], passage.title[:MAX_LABEL_CHARS])  # what clients see of them
        if key not in self._is_match:
            with _matching_lock:
                start = time.thread_time()
                id_pattern, title_pattern = self._patterns
                self._is_match[key] = bool(id_pattern.match(key[0]) and title_pattern.match(key[1]))
                self._seconds += time.thread_time() - start
            if self._seconds > FILTER_SECONDS:
                message = "the patterns of the filter take too long. Use fewer or shorter patterns."
                raise ApiError(400, message, "slow_filter")
        return self._is_match[key]


def _compile_patterns(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return one regular expression for file name patterns, such as "hr/*". One matching pattern is enough."""
    expression = re.compile("|".join(translate(pattern) for pattern in sorted(set(patterns))))
    if len(expression.pattern) > MAX_CACHED_PATTERN_CHARS:
        re.purge()  # otherwise, the cache of `re` keeps the last 512, of up to 0.5 MB each
    return expression


@dataclass(frozen=True)
class FilteredRetriever:
    """Wrapper of a retriever that returns only passages matching a filter.

    It searches deeper until enough passages match.
    """

    retriever: Retriever
    filter: PassageFilter

    @property
    def name(self) -> str:
        return f"{self.retriever.name}, filtered"

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the filtered index. It differs from the full index, so guarantees do not carry over."""
        return f"{self.retriever.fingerprint}, filtered"

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to k passages per query that match the filter. Search deeper for missing matches.

        Raises:
            ApiError: 400 if the patterns of the filter take too long.
        """
        depth, matcher = DEPTH_FACTOR * k, FilterMatcher(self.filter)
        matches: list[list[Passage]] = []
        while True:
            try:
                results = self.retriever.search(queries, depth)
            except (RejectionError, SearchBudgetError):  # so many passages can be too large for a response
                if not any(matches):
                    raise
                return matches
            matches = [list(filter(matcher.matches, passages))[:k] for passages in results]
            # The index may have more passages for a query if it returned as many as it was asked for.
            needs_more = any(
                len(matching) < k and len(passages) >= depth
                for matching, passages in zip(matches, results, strict=True)
            )
            if not needs_more or depth >= MAX_DEPTH:
                return matches
            depth = min(DEPTH_FACTOR * depth, MAX_DEPTH)


@dataclass(frozen=True)
class UnprovenGate(Gate):
    """Gate that always retrieves. It replaces a gate without the guarantee demanded by a request.

    Attributes:
        name: Name of the gate that it replaces.
        max_loss: Maximum share of answers (0 to 1) that may become wrong by skipping retrieval, as the request demands.
        cause: Why the replaced gate does not guarantee this. Shown in the reason of each decision.
    """

    name: str = ""
    max_loss: float = 0.0
    cause: str = ""
    obeys_rules = False
    is_pure = True

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [1.0 for _ in questions]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        reason = f"it is not proven here that skipping loses at most {self.max_loss:.2%} of the answers: {self.cause}"
        return [reason for _ in questions]


class FingerprintCachingRetriever:
    """Wrapper of a retriever with a cached fingerprint.

    The fingerprint identifies the content of the index. Reading it may take long, or fail, on a server.

    Args:
        retriever: The retriever.
        timeout: Maximum seconds to read the fingerprint.
        clock: The clock, as `time.monotonic`.
    """

    def __init__(self, retriever: Retriever, timeout: float, clock: Callable[[], float] = time.monotonic):
        self.retriever = retriever
        self._timeout = timeout
        self._clock = clock
        self._fingerprint = self._problem = ""
        self._expires = float("-inf")
        self._update: asyncio.Task[None] | None = None  # the current or the last one
        self._thread = ThreadPoolExecutor(1, "knowgate-fingerprint")

    @property
    def name(self) -> str:
        return self.retriever.name

    @property
    def fingerprint(self) -> str:
        """The fingerprint as of the last update. Without an update, it is read now."""
        if self._problem:
            raise BrokenIndex(f"the index cannot be identified: {self._problem}. Check its server.")
        self._fingerprint = self._fingerprint or self.retriever.fingerprint
        return self._fingerprint

    async def update_fingerprint(self) -> None:
        """Read the fingerprint in a thread if it is older than a minute, or if the last reading or search failed.

        Concurrent requests wait for the same reading. It goes on if one of them is canceled.
        """
        if self._update is None or self._update.done():
            if self._clock() < self._expires:
                return
            self._update = asyncio.get_running_loop().create_task(self._read_in_time(), context=Context())
        await asyncio.shield(self._update)

    async def _read_in_time(self) -> None:
        """Read the fingerprint in a thread. After a failure, note the reason."""
        try:
            await run_in_thread(self._thread, self._read, self._timeout)
        except Exception as error:  # noqa: BLE001 - without a fingerprint, nothing is guaranteed, so requests retrieve
            self._problem = get_reason(error, self._timeout).rstrip(".")
            self._expires = self._clock() + RETRY_SECONDS

    def _read(self) -> None:
        """Read the fingerprint. A slow reading is used when it is ready, even if nobody waits for it any more."""
        if isinstance(getattr(type(self.retriever), "fingerprint", None), cached_property):
            vars(self.retriever).pop("fingerprint", None)  # otherwise it is computed only once
        self._fingerprint = self.retriever.fingerprint
        self._problem, self._expires = "", self._clock() + FINGERPRINT_SECONDS

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search with the wrapped retriever. If that fails, the next update reads the fingerprint again."""
        try:
            return self.retriever.search(queries, k)
        except (RejectionError, BadInput):  # only this question is at fault
            raise
        except Exception:
            if not self._problem:
                self._expires = min(self._expires, self._clock())
            raise


async def update_fingerprint(rag: AdaptiveRAG) -> None:
    """Read the fingerprint of the index again if it is old, so that the guarantee of the gate is about the present index."""
    if isinstance(rag.retriever, FingerprintCachingRetriever):
        await rag.retriever.update_fingerprint()


def require_guarantee(rag: AdaptiveRAG, options: RequestOptions) -> AdaptiveRAG:
    """Return a pipeline that loses at most the share `max_loss` of answers. Without a guarantee, it always retrieves.

    Call this for each request, because the index can change.
    """
    max_loss = options.max_loss
    if max_loss is None or options.retrieve != "auto":  # "always" and "never" overrule the gate
        return rag
    try:
        cause = _explain_missing_proof(rag, max_loss)
    except KnowgateError as error:  # the index cannot be identified, so no guarantee is known to hold for it
        log.write("The guarantee of the gate '%s' cannot be checked: %s", rag.gate.name, error)
        cause = "the guarantee of the gate cannot be checked now. The log of the server says why"
    return rag.replace(gate=UnprovenGate(rag.gate.name, max_loss, cause), threshold=None) if cause else rag


def require_own_model(rag: AdaptiveRAG, max_loss: float | None, other_model: str) -> AdaptiveRAG:
    """Return a pipeline that always retrieves if a request limits the loss and asks for another LLM. No guarantee covers it.

    Args:
        rag: The pipeline.
        max_loss: Maximum loss that the request allows, or None if it limits none.
        other_model: Name of the LLM that the request asks for, or "" if it is the LLM of this server.
    """
    if max_loss is None or not other_model or isinstance(rag.gate, UnprovenGate):
        return rag
    cause = f"the guarantee of the gate is about {rag.model.name}, not about the LLM '{other_model}'"
    return rag.replace(gate=UnprovenGate(rag.gate.name, max_loss, cause), threshold=None)


def _explain_missing_proof(rag: AdaptiveRAG, max_loss: float) -> str:
    """Return why the gate does not guarantee this maximum loss, or "". Loss is the share of spoiled answers."""
    proven_loss = rag.proven_loss
    if proven_loss is not None:
        return "" if proven_loss <= max_loss else f"the proven limit of the gate is {proven_loss:.2%}"
    if is_fitted_on_recorded(rag.gate):
        return RECORDED_ADVICE  # the gate was fitted on imported answers, so its guarantee covers no known index
    return "; ".join(rag.guarantee_violations) or "the gate has no guarantee. Prove one with `knowgate calibrate`"


def describe_staleness(rag: AdaptiveRAG) -> str:
    """Return why the gate does not fit this LLM, prompt or index. "" means a good fit.

    Raises:
        KnowgateError: The gate does not work with this pipeline at all.
    """
    try:
        gate = rag.bound_gate
    except ArtifactError as error:
        return f"the calibration of the gate does not apply to this server. {error}"
    if not isinstance(gate, FittedGate) or gate.artifact.path.is_relative_to(PACKAGED_GATES):
        return ""  # packaged gates give no guarantee for the user's documents, so any index fits
    guarantee = gate.artifact.manifest.get("guarantee")
    calibrated = guarantee["retriever"]["fingerprint"] if guarantee else None
    if calibrated is None or rag.retriever is None:  # a gate calibrated on imported answers records no index
        return ""
    actual = rag.retriever.fingerprint
    return "" if calibrated == actual else f"the gate was calibrated on another index ({calibrated}, not {actual})"
