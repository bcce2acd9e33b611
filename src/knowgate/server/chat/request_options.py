"""What a request asks of the gate: by its model name (`knowgate/GATE`) or by a `knowgate` object in its body.

Requests come from outside, so they can select a gate by name but never load one from a path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from knowgate.server.json_api import ApiError, parse_request
from knowgate.server.schemas import GatedRequest, PassageFilter
from knowgate.types import Passage, Retriever

MODEL_PREFIX = "knowgate"
SELECTABLE_GATES = (
    "always", "never", "logprob:first", "logprob:mean", "logprob:min", "logprob:margin", "flare", "prompt"
)  # fmt: skip
DEPTH_FACTOR = 4  # how many times more passages are fetched if too few match a filter
MAX_DEPTH = 1000


@dataclass(frozen=True)
class RequestOptions:
    """How to decide on one request.

    Attributes:
        retrieve: "auto" leaves the decision to the gate.
        threshold: Overrides the gate's threshold.
        gate: Name of the selected gate; "" for the server's own.
        max_loss: Retrieve unless the gate guarantees to lose at most this share of answers.
        filter: Documents that may be searched.
        arm: Arm of the experiment, chosen by the server.
        shadow: Why the server retrieves whatever the gate decides; "" if it follows the gate.
    """

    retrieve: Literal["auto", "always", "never"] = "auto"
    threshold: float | None = None
    gate: str = ""
    max_loss: float | None = None
    filter: PassageFilter | None = None
    arm: str = ""
    shadow: str = ""

    @property
    def is_default(self) -> bool:
        """Whether the request leaves everything to the server."""
        return not self.gate_name and self.threshold is None and self.max_loss is None and self.filter is None

    @property
    def gate_name(self) -> str:
        """Name of the gate that the request selects; "" for the server's own."""
        return self.gate if self.retrieve == "auto" else self.retrieve


def read_request_options(body: Mapping[str, Any]) -> RequestOptions:
    """Read the model name and the `knowgate` object of a request body."""
    request = parse_request(GatedRequest, body)
    gate = _read_gate_name(request.model)
    if request.knowgate is None:
        return RequestOptions(gate=gate)
    return RequestOptions(
        retrieve=request.knowgate.retrieve,
        threshold=request.knowgate.threshold,
        gate=gate,
        max_loss=request.knowgate.max_loss,
        filter=request.knowgate.filter,
    )


def _read_gate_name(model: str | None) -> str:
    """Return the gate that a model name such as knowgate/always selects; "" for others."""
    if model is None or not model.startswith(f"{MODEL_PREFIX}/"):
        return ""
    name = model.removeprefix(f"{MODEL_PREFIX}/")
    if name not in SELECTABLE_GATES:
        known = ", ".join(SELECTABLE_GATES)
        raise ApiError(404, f"a request cannot select the gate '{name[:80]}'. Known: {known}.", "model_not_found")
    return name


def is_knowgate_model(model: str | None) -> bool:
    """Whether a model name stands for this server's default model rather than one of the upstream's."""
    return model is None or model == MODEL_PREFIX or model.startswith(f"{MODEL_PREFIX}/")


@dataclass(frozen=True)
class FilteredRetriever:
    """Returns only passages that match a filter. Works with any retriever by searching deeper until enough match."""

    retriever: Retriever
    filter: PassageFilter

    @property
    def name(self) -> str:
        return f"{self.retriever.name}, filtered"

    @property
    def fingerprint(self) -> str:
        """Differs from the retriever's, because guarantees for all documents do not hold for some of them."""
        return f"{self.retriever.fingerprint}, filtered"

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search, and increase the depth until every query has k matching passages or no more results."""
        depth = DEPTH_FACTOR * k
        while True:
            results = self.retriever.search(queries, depth)
            matches = [[passage for passage in hits if self.filter.matches(passage)][:k] for hits in results]
            if depth >= MAX_DEPTH or all(
                len(kept) == k or len(hits) < depth for kept, hits in zip(matches, results, strict=True)
            ):
                return matches
            depth = min(DEPTH_FACTOR * depth, MAX_DEPTH)
