"""Logits of label tokens at marked positions of a prompt, all in one forward pass.

Knows tokenisation in place: text up to a label and the label itself are tokenised apart, because some tokenizers
merge 'Answer:' and 'true' into other tokens when they stand together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from knowgate.errors import BadSetting, ModelError
from knowgate.types import LabelPrompt, Vector

if TYPE_CHECKING:
    from knowgate.models.hf import HFModel


def read_labels(model: HFModel, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
    """For each prompt an array (marked positions x labels)."""
    columns = torch.tensor(label_ids(model, labels), device=model.loaded.device)
    cut = [_cut(model, prompt) for prompt in prompts]
    return [_logits(model, ids, marks, columns) for ids, marks in cut]


def label_ids(model: HFModel, labels: Sequence[str]) -> list[int]:
    """First token of each label as it stands in place; labels that begin alike cannot be told apart."""
    ids = [model.tokenise(label)[0] for label in labels if label]
    if len(ids) < len(labels) or len(set(ids)) < len(ids):
        raise BadSetting(f"the labels {', '.join(map(repr, labels))} do not begin with different tokens.")
    return ids


def _cut(model: HFModel, prompt: LabelPrompt) -> tuple[list[int], list[int]]:
    """Token ids, and the positions from which each label is predicted."""
    chat = not prompt.raw and bool(model.loaded.tokenizer.chat_template)
    if chat and len(prompt.parts) > 1:
        raise BadSetting("a user turn has one label position, at its end; use raw=True for several.")
    parts = [model.render(prompt.parts[0])] if chat else list(prompt.parts)
    ids: list[int] = []
    marks: list[int] = []
    for number, part in enumerate(parts):
        ids += model.tokenise(part, special=number == 0 and not chat)
        marks.append(len(ids) - 1)
    model.check_length(len(ids), 1)
    return ids, marks


def _logits(model: HFModel, ids: list[int], marks: list[int], columns: torch.Tensor) -> Vector:
    keep = torch.tensor(marks, device=columns.device)
    out: Any = model.loaded.model(
        input_ids=torch.tensor([ids], device=columns.device), use_cache=False, logits_to_keep=keep
    )
    values: Vector = out.logits[0][:, columns].float().cpu().numpy()
    if not np.isfinite(values).all():
        raise ModelError("the model gave NaN instead of label logits: its weights or number format are bad.")
    return values
