"""Losses of the reranker, each over one question's own passages: InfoNCE as printed in CBDR, and a graded one.

The stock multiple-negatives loss of sentence-transformers adds random passages of other questions; the paper's has
only the question's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from knowgate.errors import ModelError


def infonce(scores: torch.Tensor, positive: torch.Tensor, temperature: float) -> torch.Tensor:
    """-log(f+ / (f+ + sum f-)), f = exp(score / temperature), for each positive: CBDR, equations 4 and 5.

    Positives of one question share its negatives, so each passage is read once for all of them.
    """
    logits = scores / temperature
    negatives = torch.logsumexp(logits[~positive], dim=-1)
    return torch.logaddexp(logits[positive], negatives) - logits[positive]


def listwise(scores: torch.Tensor, shifts: torch.Tensor, temperature: float) -> torch.Tensor:
    """Cross-entropy between the softmax of the shifts and that of the scores: all candidates, by degrees (ListNet).

    Shifts are brought to unit spread first, so that one temperature does for confidences and log-probabilities.
    """
    spread = shifts.std(correction=0).clamp(min=1e-6)
    wanted = torch.softmax(shifts / spread / temperature, dim=-1)
    return -(wanted * torch.log_softmax(scores, dim=-1)).sum()


class GroupLoss(nn.Module):  # type: ignore[misc]
    """Mean loss of a batch of groups: questions, their passages, and one label per passage.

    kind `infonce`: labels are 1 for positives and 0 for negatives. kind `listwise`: labels are the shifts.
    """

    def __init__(self, model: Any, kind: str, temperature: float) -> None:
        super().__init__()
        self.model, self.kind, self.temperature = model, kind, temperature

    def forward(
        self,
        inputs: Sequence[Any],
        labels: Sequence[torch.Tensor],
        prompt: str | None = None,
        task: str | None = None,
    ) -> torch.Tensor:
        questions, groups = inputs
        pairs = [(question, passage) for question, group in zip(questions, groups, strict=True) for passage in group]
        parts = self._scores(pairs, prompt, task).split([len(group) for group in groups])
        losses = [self._loss(scores, label) for scores, label in zip(parts, labels, strict=True)]
        return torch.cat(losses).mean()

    def _loss(self, scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if self.kind == "infonce":
            return infonce(scores, label.to(scores.device) > 0, self.temperature)
        return listwise(scores, label.to(scores), self.temperature)[None]

    def _scores(self, pairs: list[tuple[str, str]], prompt: str | None, task: str | None) -> torch.Tensor:
        tokens = self.model.preprocess(pairs, prompt=prompt, task=task)
        device = self.model.device
        inputs = {key: value.to(device) if hasattr(value, "to") else value for key, value in tokens.items()}
        scores: torch.Tensor = self.model(inputs)["scores"].reshape(-1).float()
        if not bool(torch.isfinite(scores).all()):
            raise ModelError("training the reranker gave NaN: use a lower --learning-rate or a higher --temperature.")
        return scores

    def get_config_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "temperature": self.temperature}
