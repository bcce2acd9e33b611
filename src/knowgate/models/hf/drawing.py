"""A token for each row of logits, by a uniform number: from the whole distribution, or from the most probable tokens.

Knows tensors; not where the logits come from or what becomes of the tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from knowgate.errors import ModelError
from knowgate.types import Sampling

FEW = 256  # tokens among which top_p is looked for first


def draw(logits: torch.Tensor, uniforms: NDArray[np.float64], sampling: Sampling) -> list[int]:
    """Inverse-CDF sampling: the token at which the cumulative probability passes the uniform number."""
    numbers = torch.tensor(uniforms, dtype=torch.float32, device=logits.device)[:, None]
    tokens, are_finite = draw_on_device(logits, numbers, sampling)
    if not bool(are_finite):
        raise no_numbers()
    drawn: list[int] = tokens[:, 0].tolist()
    return drawn


def draw_on_device(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """As many tokens for each row of logits as it has uniform numbers, and whether all logits were numbers: nobody
    waits for the device to know it."""
    scaled = logits.float() / sampling.temperature
    if sampling.is_whole:
        return _pick(torch.softmax(scaled, dim=-1), uniforms, logits.shape[1] - 1)
    kept, tokens = most_probable(scaled, sampling)
    places, are_finite = _pick(kept, uniforms, (kept > 0).sum(dim=-1, keepdim=True) - 1)
    return tokens.gather(1, places), are_finite


def no_numbers() -> ModelError:
    return ModelError("the model gave NaN instead of token probabilities: its weights or number format are bad.")


def most_probable(scaled: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and tokens, best first; 0 for what top_p cuts off."""
    shares, tokens = _best(scaled, sampling.top_k) if sampling.top_k else _reaching(scaled, sampling.top_p)
    inside = shares.cumsum(dim=-1) - shares < sampling.top_p
    inside[:, 0] = True  # sums are rounded: the best one always stays
    return shares.where(inside | shares.isnan(), 0), tokens


def _best(scaled: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, tokens = scaled.topk(min(k, scaled.shape[1]))
    return torch.softmax(values, dim=-1), tokens


def _reaching(scaled: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As many of the best as reach `share` in every row, tried with a few first: sorting a vocabulary is slow."""
    width, total = FEW, scaled.logsumexp(dim=-1, keepdim=True)
    while True:
        values, tokens = scaled.topk(min(width, scaled.shape[1]))
        shares = (values - total).exp()
        if width >= scaled.shape[1] or bool((shares.sum(dim=-1) >= share).all()):
            return shares, tokens
        width *= 8


def _pick(shares: torch.Tensor, uniforms: torch.Tensor, last: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns for each row. last: the last one that may be chosen, as a uniform number may be rounded up to 1."""
    cumulative = shares.cumsum(dim=-1)
    total = cumulative[:, -1:]
    places = torch.searchsorted(cumulative, uniforms * total, right=True)
    return torch.minimum(places, torch.as_tensor(last, device=places.device)), torch.isfinite(total).all()
