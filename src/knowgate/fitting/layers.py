"""Which of the layers a label run kept a fit reads: by number, or by a name that is a place in the network."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.errors import BadSetting
from knowgate.fitting.examples import Examples
from knowgate.labels import NAMED_LAYERS, named_layers


def pick_layer(examples: Examples, layer: str) -> int:
    """'mid' (CBDR 3.1: entry floor(len / 2) of the hidden states, embeddings included), 'late', 'last' or a number."""
    kept = sorted(examples.readings[0].hidden)
    if not kept:
        raise BadSetting("the label runs hold no hidden states. Label again with --layers mid,late,last.")
    if layer in NAMED_LAYERS:
        return _named(examples, layer, kept)
    if layer.lstrip("-").isdigit() and int(layer) in kept:
        return int(layer)
    raise BadSetting(f"--layer is '{layer}'; the label runs have {_listed(kept)} (or: mid, late, last).")


def _named(examples: Examples, layer: str, kept: Sequence[int]) -> int:
    """The layer of this name, which must be among the kept ones."""
    found = {named_layers(depth)[layer] for depth in depths(examples, kept)}
    if not found:
        raise BadSetting(
            f"the label runs do not say how deep the LLM is, so nobody knows which layer is '{layer}'. "
            f"Name one by its number: --layer {kept[0]} (they have {_listed(kept)})."
        )
    there = sorted(found & set(kept))
    if len(there) != 1:
        raise BadSetting(
            f"'{layer}' is layer {' or '.join(map(str, sorted(found)))} of this LLM; the label runs have "
            f"{_listed(kept)}. Use one of those, or label again with --layers {layer}."
        )
    return there[0]


def depths(examples: Examples, kept: Sequence[int]) -> list[int]:
    """How many hidden states the LLM has: as the run says, or, of older runs, all that their layers can mean.

    A run labelled with SeaKR names the middle layer. Else the kept ones must be the named ones of one network.
    """
    if examples.settings.get("depth"):
        return [int(examples.settings["depth"])]
    middle = int(examples.settings.get("seakr_layer") or kept[0])
    possible = [2 * middle, 2 * middle + 1]
    if examples.settings.get("seakr_layer"):
        return possible
    return [depth for depth in possible if len(kept) > 1 and set(kept) <= set(named_layers(depth).values())]


def _listed(kept: Sequence[int]) -> str:
    return ", ".join(map(str, kept))
