"""Logits of label tokens at marked positions of a prompt, all in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from knowgate.errors import ModelError
from knowgate.models.hf.decoding import pad_left
from knowgate.models.hf.local import LocalModel
from knowgate.models.marked import MarkedTokens
from knowgate.types import Vector


def read_labels(model: LocalModel, prompts: Sequence[MarkedTokens], columns: Sequence[int]) -> list[Vector]:
    """For each prompt an array (marked positions x labels), from one forward pass over all."""
    device = model.loaded.device
    first_mark = min(prompt.marks[0] for prompt in prompts)
    beginnings = [prompt.ids[: first_mark + 1] for prompt in prompts]
    shared = min(prompt.prefix for prompt in prompts)
    done, cache = model.prefixes.start(model.loaded.model, beginnings, device, worth_keeping=shared)
    tokens, mask = pad_left([prompt.ids[done:] for prompt in prompts], model.pad, device)
    mask = torch.cat([mask.new_ones(len(prompts), done), mask], dim=1)
    states = model.loaded.model.base_model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0)[:, done:],
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    width = tokens.shape[1]
    line = [row for row, prompt in enumerate(prompts) for _ in prompt.marks]
    place = [width - len(prompt.ids) + mark for prompt in prompts for mark in prompt.marks]
    values = _logits(model.loaded.model, states[line, place], columns)
    ends = np.cumsum([len(prompt.marks) for prompt in prompts])[:-1]
    return [part.copy() for part in np.split(values, ends)]


def _logits(model: Any, states: torch.Tensor, columns: Sequence[int]) -> Vector:
    """The head applied to these states and label tokens alone: the other 50,000 columns are nobody's business."""
    values: Vector = head_logits(model, states, columns).cpu().numpy()
    if not np.isfinite(values).all():
        raise ModelError("the model gave NaN instead of label logits: its weights or number format are bad.")
    return values


def head_logits(model: Any, states: torch.Tensor, columns: Sequence[int] | None = None) -> torch.Tensor:
    """Logits of the given tokens, or of all, as the model itself computes them: with its bias, scale and cap."""
    head = model.get_output_embeddings()
    chosen = slice(None) if columns is None else torch.tensor(list(columns), device=states.device)
    logits = (states @ head.weight[chosen].T).float()
    if getattr(head, "bias", None) is not None:
        logits = logits + head.bias[chosen].float()
    config = model.config.get_text_config()
    logits = logits * float(getattr(config, "logit_scale", None) or 1.0)
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits
