"""Only some documents: passages whose id and title fit the patterns that a request gives.

Any retriever can be asked so: it is asked for more until enough of them fit. Knows nothing of indexes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from knowgate.core.schema import NumberRange, read_record
from knowgate.errors import BadInput
from knowgate.server.json_api import ApiError
from knowgate.types import Passage, Retriever

DEPTH_FACTOR = 4  # times as many passages are asked for where too few fit
MAX_DEPTH = 1000


@dataclass(frozen=True)
class PassageFilter:
    """Patterns as of file names (`hr/*`), one of which must fit; none: all do."""

    id: tuple[str, ...] | str = ()
    title: tuple[str, ...] | str = ()

    def fits(self, passage: Passage) -> bool:
        return _fits(passage.id, self.id) and _fits(passage.title, self.title)


def _fits(text: str, patterns: tuple[str, ...] | str) -> bool:
    several = (patterns,) if isinstance(patterns, str) else patterns
    return not several or any(fnmatchcase(text, pattern) for pattern in several)


@dataclass(frozen=True)
class FilteredRetriever:
    """A retriever that finds only what fits."""

    retriever: Retriever
    wanted: PassageFilter

    @property
    def name(self) -> str:
        return f"{self.retriever.name}, filtered"

    @property
    def fingerprint(self) -> str:
        return f"{self.retriever.fingerprint}, filtered"  # nothing that was shown for all documents holds for some

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        depth = DEPTH_FACTOR * k
        while True:
            found = self.retriever.search(queries, depth)
            fitting = [[passage for passage in row if self.wanted.fits(passage)][:k] for row in found]
            if depth >= MAX_DEPTH or all(
                len(kept) == k or len(row) < depth for kept, row in zip(fitting, found, strict=True)
            ):
                return fitting
            depth = min(DEPTH_FACTOR * depth, MAX_DEPTH)


MODEL_PREFIX = "knowgate"
KNOWN_FIELDS = (
    "retrieve (auto, always, never), threshold (0 to 1), max_loss (0 to 1), filter (id, title: lists of patterns)"
)
SELECTABLE_GATES = (
    "always",
    "never",
    "logprob:first",
    "logprob:mean",
    "logprob:min",
    "logprob:margin",
    "flare",
    "prompt",
)


@dataclass(frozen=True)
class RequestOptions:
    """retrieve: 'auto' leaves it to the gate. gate: its name, '' for the server's own.

    max_loss: share of the answers that skipping may cost; where no such thing is proven, it is retrieved.
    filter: which documents may be searched.
    arm, shadow: what the server decides for itself: which of its gates, and why everything is looked up whatever that
    gate says ('' where it is obeyed).
    """

    retrieve: Literal["auto", "always", "never"] = "auto"
    threshold: float | None = None
    gate: str = ""
    max_loss: float | None = None
    filter: PassageFilter | None = None
    arm: str = ""
    shadow: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether the request leaves all to the server."""
        return not self.chosen and self.threshold is None and self.max_loss is None and self.filter is None

    @property
    def chosen(self) -> str:
        """The gate that decides, by name."""
        return self.gate if self.retrieve == "auto" else self.retrieve


@dataclass(frozen=True)
class KnowgateField:
    """The `knowgate` object of a request."""

    retrieve: Literal["auto", "always", "never"] = "auto"
    threshold: Annotated[float, NumberRange(0, 1)] | None = None
    max_loss: Annotated[float, NumberRange(0, 1)] | None = None
    filter: PassageFilter | None = None


def read_request_options(body: Mapping[str, Any]) -> RequestOptions:
    wish = _wish(body.get(MODEL_PREFIX))
    return RequestOptions(wish.retrieve, wish.threshold, _named_gate(body.get("model")), wish.max_loss, wish.filter)


def _wish(value: object) -> KnowgateField:
    if value is None:
        return KnowgateField()
    try:
        return read_record(KnowgateField, value, "'knowgate'")
    except BadInput as error:
        raise ApiError(400, f"{error} Known: {KNOWN_FIELDS}.", "policy") from None


def _named_gate(model: object) -> str:
    if model is not None and not isinstance(model, str):
        raise ApiError(400, "'model' must be a text.", "invalid_type")
    if model is None or not model.startswith(f"{MODEL_PREFIX}/"):
        return ""
    name = model.removeprefix(f"{MODEL_PREFIX}/")
    if name not in SELECTABLE_GATES:
        raise ApiError(
            404, f"no gate '{name[:80]}' can be named here. Known: {', '.join(SELECTABLE_GATES)}.", "model_not_found"
        )
    return name


def is_knowgate_model(model: object) -> bool:
    """A model name that means this server's own, not one of the upstream's."""
    return model is None or (isinstance(model, str) and (model == MODEL_PREFIX or model.startswith(f"{MODEL_PREFIX}/")))
