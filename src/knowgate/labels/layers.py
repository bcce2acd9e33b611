"""Which hidden states a run keeps: words such as 'mid,late' to layer numbers of the model at hand."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.errors import BadSetting
from knowgate.types import ListingModel, Model, Signal, Want

NAMED_LAYERS = ("mid", "late", "last")
NONE = "none"


def layer_numbers(layers: str | Sequence[int], model: Model) -> tuple[int, ...]:
    """Layer numbers of 'mid,late,last', of figures, or of 'none'; none where the backend has no hidden states."""
    words = layers.split(",") if isinstance(layers, str) else [str(number) for number in layers]
    asked = [word.strip() for word in words if word.strip()]
    if asked == [NONE] or Signal.HIDDEN not in model.offers:
        return ()
    numbers = tuple(sorted({_number(word, model.depth) for word in asked}))
    if isinstance(model, ListingModel):
        model.check_want(Want(layers=numbers))  # before anything is asked
    return numbers


def named_layers(depth: int) -> dict[str, int]:
    """What mid, late and last are in a network of so many hidden states, embeddings included."""
    return dict(zip(NAMED_LAYERS, (depth // 2, 3 * depth // 4, depth - 1), strict=True))


def _number(word: str, depth: int) -> int:
    named = named_layers(depth)
    if word in named:
        return named[word]
    if not word.lstrip("-").isdigit():
        raise BadSetting(f"--layers: '{word}' is neither a number nor one of {', '.join(NAMED_LAYERS)}, {NONE}.")
    return int(word) % depth
