"""Losses of the reranker over one question's own passages: InfoNCE as in CBDR, and a graded one (ListNet).

The multiple-negatives loss of sentence-transformers adds passages of other questions as negatives; the paper's loss has
only the question's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from knowgate.errors import ModelError


def infonce(scores: torch.Tensor, positive: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return -log(f+ / (f+ + sum f-)), f = exp(score / temperature), for each positive (CBDR, equations 4 and 5).

    Positives of one question share its negatives, so each passage is read once for all of them.
    """
    logits = scores / temperature
    negatives = torch.logsumexp(logits[~positive], dim=-1)
    return torch.logaddexp(logits[positive], negatives) - logits[positive]


def listwise(scores: torch.Tensor, shifts: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the cross-entropy between the softmax of the shifts and that of the scores (ListNet).

    Shifts are scaled to unit variance first, so that one temperature suits confidences and log-probabilities.
    """
    spread = shifts.std(correction=0).clamp(min=1e-6)
    target = torch.softmax(shifts / spread / temperature, dim=-1)
    return -(target * torch.log_softmax(scores, dim=-1)).sum()


class GroupLoss(nn.Module):  # type: ignore[misc]
    """Mean loss of a batch of groups: questions, their passages, and one label per passage.

    Args:
        model: A cross-encoder.
        kind: "infonce" (labels are 1 for positives and 0 for negatives) or "listwise" (labels are shifts).
        temperature: Temperature of the loss.
    """

    def __init__(self, model: Any, kind: str, temperature: float) -> None:
        super().__init__()
        self.model, self.kind, self.temperature = model, kind, temperature

    def forward(
        self, questions: Sequence[str], passages: Sequence[Sequence[str]], labels: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Score all pairs in one pass and return the mean loss."""
        pairs = [(question, text) for question, group in zip(questions, passages, strict=True) for text in group]
        scores = self._score(pairs).split([len(group) for group in passages])
        losses = [self._compute_loss(group, label) for group, label in zip(scores, labels, strict=True)]
        return torch.cat(losses).mean()

    def _compute_loss(self, scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if self.kind == "infonce":
            return infonce(scores, label.to(scores.device) > 0, self.temperature)
        return listwise(scores, label.to(scores), self.temperature)[None]

    def _score(self, pairs: list[tuple[str, str]]) -> torch.Tensor:
        tokens = self.model.preprocess(pairs)
        device = self.model.device
        inputs = {key: value.to(device) if hasattr(value, "to") else value for key, value in tokens.items()}
        scores: torch.Tensor = self.model(inputs)["scores"].reshape(-1).float()
        if not bool(torch.isfinite(scores).all()):
            raise ModelError("training the reranker gave NaN: use a lower `learning_rate` or a higher `temperature`.")
        return scores
