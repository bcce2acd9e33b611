"""How probable a given answer is after a prompt: one forward pass scores all its tokens.

Knows token ids; not what the answers are wanted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from knowgate.errors import ModelError
from knowgate.models.hf.decoding import pad_left
from knowgate.models.hf.labels import head_logits
from knowgate.models.hf.local import LocalModel


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt followed by an answer; the last `answer` tokens of `ids` are the answer's."""

    ids: list[int]
    answer: int


def mean_logprobs(model: LocalModel, rows: Sequence[AnsweredPrompt]) -> list[float]:
    """Mean log-probability of each row's answer tokens; the head is applied at their places alone."""
    tokens, mask = pad_left([row.ids for row in rows], model.pad, model.loaded.device)
    states = model.loaded.model.base_model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state
    width = tokens.shape[1]
    line = [number for number, row in enumerate(rows) for _ in range(row.answer)]
    place = [width - row.answer + step for row in rows for step in range(row.answer)]
    before = [position - 1 for position in place]
    logp = torch.log_softmax(head_logits(model.loaded.model, states[line, before]), dim=-1)
    values = logp.gather(1, tokens[line, place][:, None])[:, 0]
    if not bool(torch.isfinite(values).all()):
        raise ModelError("the model gave NaN instead of token probabilities: its weights or number format are bad.")
    return [float(part.mean()) for part in values.cpu().split([row.answer for row in rows])]
