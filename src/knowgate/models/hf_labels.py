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
from knowgate.models.hf_stream import pad_left
from knowgate.types import LabelPrompt, Vector

if TYPE_CHECKING:
    from knowgate.models.hf import HFModel


Cut = tuple[list[int], list[int]]


def read_labels(model: HFModel, prompts: Sequence[Cut], columns: Sequence[int]) -> list[Vector]:
    """For each prompt (token ids, marks) an array (marked positions x labels), from one forward pass over all."""
    device = model.loaded.device
    first_mark = min(marks[0] for _, marks in prompts)
    done, cache = model.prefixes.start(model.loaded.model, [ids[: first_mark + 1] for ids, _ in prompts], device)
    tokens, mask = pad_left([ids[done:] for ids, _ in prompts], model.pad, device)
    width = tokens.shape[1]
    places = [[width - len(ids) + mark for mark in marks] for ids, marks in prompts]
    keep = sorted({place for row in places for place in row})
    mask = torch.cat([mask.new_ones(len(prompts), done), mask], dim=1)
    out: Any = model.loaded.model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0)[:, done:],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=torch.tensor(keep, device=device),
    )
    chosen = out.logits[:, :, torch.tensor(list(columns), device=device)].float().cpu().numpy()
    if not np.isfinite(chosen).all():
        raise ModelError("the model gave NaN instead of label logits: its weights or number format are bad.")
    where = {place: number for number, place in enumerate(keep)}
    return [chosen[i, [where[place] for place in row]] for i, row in enumerate(places)]


def label_ids(model: HFModel, labels: Sequence[str]) -> list[int]:
    """First token of each label as it stands in place; labels that begin alike cannot be told apart."""
    ids = [model.tokenise(label)[0] for label in labels if label]
    if len(ids) < len(labels) or len(set(ids)) < len(ids):
        raise BadSetting(f"the labels {', '.join(map(repr, labels))} do not begin with different tokens.")
    return ids


def cut_prompt(model: HFModel, prompt: LabelPrompt) -> Cut:
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
