"""What a request wants of the gate: by its model name (`knowgate/GATE`), or by a `knowgate` object in its body.

Gates can only be named, never loaded from a path: a request comes from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from knowgate.errors import BadInput
from knowgate.server.filtering import Filter
from knowgate.server.problems import Problem
from knowgate.typed import Between, read_record

PREFIX = "knowgate"
KNOWN = "retrieve (auto, always, never), threshold (0 to 1), max_loss (0 to 1), filter (id, title: lists of patterns)"
NAMEABLE = ("always", "never", "logprob:first", "logprob:mean", "logprob:min", "logprob:margin", "flare", "prompt")


@dataclass(frozen=True)
class Policy:
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
    filter: Filter | None = None
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
class Wish:
    """The `knowgate` object of a request."""

    retrieve: Literal["auto", "always", "never"] = "auto"
    threshold: Annotated[float, Between(0, 1)] | None = None
    max_loss: Annotated[float, Between(0, 1)] | None = None
    filter: Filter | None = None


def policy_of(body: Mapping[str, Any]) -> Policy:
    wish = _wish(body.get(PREFIX))
    return Policy(wish.retrieve, wish.threshold, _named_gate(body.get("model")), wish.max_loss, wish.filter)


def _wish(value: object) -> Wish:
    if value is None:
        return Wish()
    try:
        return read_record(Wish, value, "'knowgate'")
    except BadInput as error:
        raise Problem(400, f"{error} Known: {KNOWN}.", "policy") from None


def _named_gate(model: object) -> str:
    if model is not None and not isinstance(model, str):
        raise Problem(400, "'model' must be a text.", "invalid_type")
    if model is None or not model.startswith(f"{PREFIX}/"):
        return ""
    name = model.removeprefix(f"{PREFIX}/")
    if name not in NAMEABLE:
        raise Problem(404, f"no gate '{name[:80]}' can be named here. Known: {', '.join(NAMEABLE)}.", "model_not_found")
    return name


def is_ours(model: object) -> bool:
    """A model name that means this server's own, not one of the upstream's."""
    return model is None or (isinstance(model, str) and (model == PREFIX or model.startswith(f"{PREFIX}/")))
