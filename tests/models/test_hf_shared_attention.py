"""Shared attention, checked against plain attention over keys and values repeated for every answer."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from knowgate.models.hf.forward_pass import (
    SharedCache,
    compute_shared_attention,
    supports_shared_cache,
    use_shared_attention,
)


class Attention:
    """The part of an attention layer that the function uses."""

    layer_idx = 0


def config(**values):
    return SimpleNamespace(
        get_text_config=lambda: SimpleNamespace(_attn_implementation="sdpa", **values), _attn_implementation="sdpa"
    )


@pytest.mark.parametrize(("heads", "groups", "answers"), [(2, 3, 4), (1, 1, 1), (3, 2, 5)])
def test_shared_attention_equals_attention_over_all_tokens(heads, groups, answers):
    torch.manual_seed(0)
    prompts, length, width, steps = 3, 7, 8, 4
    keys, values = torch.randn(2, prompts, heads, length, width)
    mask = torch.tensor([[1] * 7, [1, 1, 0, 0, 1, 1, 1], [0] * 6 + [1]])  # padding may follow a shared prefix
    cache = SharedCache(DynamicCache([(keys, values)]), mask, answers, max_tokens=steps)
    model, own = SimpleNamespace(config=config()), []
    for step in range(steps):
        query = torch.randn(prompts * answers, heads * groups, 1, width)
        own.append(torch.randn(2, prompts * answers, heads, 1, width))
        with use_shared_attention(model, cache):
            cache.start_token()
            states = cache.update(own[-1][0], own[-1][1], 0)
            ours, _ = compute_shared_attention(Attention(), query, *states, None, scaling=0.3)
        all_keys, all_values = (
            torch.cat([part.repeat_interleave(answers, dim=0), *(pair[i] for pair in own)], dim=2)
            for i, part in enumerate((keys, values))
        )
        seen = torch.cat([mask.bool().repeat_interleave(answers, 0), torch.ones(prompts * answers, step + 1).bool()], 1)
        plain = scaled_dot_product_attention(
            query, all_keys, all_values, attn_mask=seen[:, None, None], scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(ours, plain.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_selected_answers_keep_their_own_keys():
    keys = torch.arange(2.0)[:, None, None, None].expand(2, 1, 3, 1)
    cache = SharedCache(DynamicCache([(keys, keys)]), torch.ones(2, 3), answers=3, max_tokens=2)
    cache.start_token()
    cache.update(torch.arange(6.0)[:, None, None, None], torch.arange(6.0)[:, None, None, None], 0)
    cache.select(torch.tensor([[1]]), torch.tensor([[2, 0]]), has_all_prompts=False)
    cache.start_token()
    own, _ = cache.update(torch.tensor([8.0, 9.0])[:, None, None, None], torch.zeros(2, 1, 1, 1), 0)
    assert own.flatten().tolist() == [5.0, 8.0, 3.0, 9.0]
    assert cache.layers[0].prompt_keys.flatten().tolist() == [1.0] * 3


def test_the_original_attention_is_restored_after_an_error():
    text = SimpleNamespace(_attn_implementation="sdpa")
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    with contextlib.suppress(RuntimeError), use_shared_attention(model, SimpleNamespace()):
        assert text._attn_implementation != "sdpa"
        raise RuntimeError
    assert text._attn_implementation == "sdpa"


def test_unsupported_attention_is_an_error():
    with pytest.raises(RuntimeError, match="softcap cannot use a cache that several answers share"):
        compute_shared_attention(Attention(), *[torch.zeros(1, 1, 1, 1)] * 3, None, softcap=50.0, sliding_window=None)


@pytest.mark.parametrize(
    ("values", "shares"),
    [
        ({}, True),
        ({"layer_types": ["full_attention"]}, True),
        ({"sliding_window": None}, True),
        ({"sliding_window": 4096}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"attn_logit_softcapping": 50.0}, False),
    ],
)
def test_only_plain_attention_is_shared(values, shares):
    assert supports_shared_cache(SimpleNamespace(config=config(**values), _supports_attention_backend=True)) == shares
    assert not supports_shared_cache(SimpleNamespace(config=config(**values)))
