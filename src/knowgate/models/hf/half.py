"""A pass that stops half-way up: the lower layers only, with what the upper ones need to go on later.

When a gate reads nothing but a middle layer, a question that is retrieved for never pays for the upper half; one that
is skipped goes on from here. Works on decoders whose layers take one stream of states (Llama, Qwen, Mistral, ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


class _Stopped(Exception):
    """Thrown from inside the model, below the layer that is not wanted."""


@dataclass(frozen=True)
class Half:
    """States that are the input of `layer`, and the other arguments the layers are called with."""

    layer: int
    states: torch.Tensor
    arguments: Mapping[str, Any]

    def select(self, rows: torch.Tensor, cache: Any) -> Half:
        """Some rows, going on in a cache of their own."""
        size = self.states.shape[0]
        arguments = {key: _rows(value, rows, size) for key, value in self.arguments.items()}
        return Half(self.layer, self.states[rows], {**arguments, "past_key_values": cache})

    def finish(self, model: Any) -> torch.Tensor:
        """Run the upper layers; gives the logits of the next token."""
        states = self.states
        for layer in model.base_model.layers[self.layer :]:
            out = layer(states, **self.arguments)
            states = out[0] if isinstance(out, tuple) else out
        logits: torch.Tensor = model.get_output_embeddings()(model.base_model.norm(states[:, -1:]))[:, -1]
        return logits


def can_stop(model: Any) -> bool:
    """Whether the model is built as this file assumes; others run the whole pass."""
    base, config = model.base_model, model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = not getattr(config, "final_logit_softcapping", None) and not getattr(config, "logit_scale", None)
    return hasattr(base, "layers") and hasattr(base, "norm") and kinds == {"full_attention"} and plain


def run_half(model: Any, layer: int, **inputs: Any) -> Half:
    """The pass up to, and without, `layer`."""
    caught: dict[str, Any] = {}

    def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.update(states=args[0] if args else kwargs["hidden_states"], kwargs=kwargs)
        raise _Stopped

    hook = model.base_model.layers[layer].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model.base_model(**inputs)
    except _Stopped:
        pass
    finally:
        hook.remove()
    arguments = {key: value for key, value in caught["kwargs"].items() if key != "hidden_states"}
    return Half(layer, caught["states"], arguments)


def _rows(value: Any, rows: torch.Tensor, size: int) -> Any:
    """The chosen rows of whatever has one row per prompt."""
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == size:
        return value[rows]
    if isinstance(value, tuple):
        return tuple(_rows(item, rows, size) for item in value)
    return value
