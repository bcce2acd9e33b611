"""What a server really gives: it may refuse a parameter, or take it and ignore it.

One tiny request asks for everything; if it is refused, parameters are added one by one. What counts is what
came back, not what was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from knowgate.models.openai.reply import listed_tokens, read_choices
from knowgate.models.openai.wire import StatusError

# Best first. Sampling: -1 switches top_k off in vLLM, SGLang and llama.cpp; some gateways want 0.
PARAMETERS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "logprobs": (
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 5},
        {"logprobs": True},
    ),
    "n": ({"n": 2},),
    "seed": ({"seed": 0},),
    "sampling": ({"top_k": -1, "min_p": 0.0}, {"top_k": 0, "min_p": 0.0}),
}
Post = Callable[[str, dict[str, Any]], Any]  # path and body to reply
PROBE_TOKENS = 4
WIDE = 2_000  # tokens listed where a server has no cap: enough for entropies, 100 kB a place
REFUSALS = (400, 422, 500, 501)  # some servers crash on what they do not know


@dataclass(frozen=True)
class Abilities:
    """`top` is how many tokens are listed at each place; `sampling` switches off the server's own cuts."""

    logprobs: bool
    top: int
    n: bool
    seed: bool
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class _Trial:
    """A body the server took and its reply."""

    body: Mapping[str, Any]
    reply: Any


def probe(post: Post, model: str) -> Abilities:
    """Ask once; raises what the plainest request raises."""
    plain: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": PROBE_TOKENS,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    everything = {key: value for options in PARAMETERS.values() for key, value in options[0].items()}
    trial = _try(post, {**plain, **everything}) or _one_by_one(post, plain)
    return _abilities(trial)


def probe_wide(post: Post, model: str) -> bool:
    """Whether the server lists as many tokens as it is asked for: llama.cpp does, most have a cap of 20 or so."""
    turn = [{"role": "user", "content": "Hi"}]
    asked = {"model": model, "messages": turn, "max_tokens": 1, "temperature": 0.0}
    trial = _try(post, {**asked, "logprobs": True, "top_logprobs": WIDE})
    listed = listed_tokens(trial.reply) if trial else None
    return bool(listed) and len(listed[0].top) == WIDE  # type: ignore[index]


def _one_by_one(post: Post, plain: Mapping[str, Any]) -> _Trial:
    best = _Trial(plain, post("/chat/completions", dict(plain)))
    for options in PARAMETERS.values():
        trials = (_try(post, {**best.body, **option}) for option in options)
        best = next((trial for trial in trials if trial), best)
    return best


def _try(post: Post, body: Mapping[str, Any]) -> _Trial | None:
    try:
        return _Trial(body, post("/chat/completions", dict(body)))
    except StatusError as error:
        if error.status in REFUSALS:
            return None
        raise


def _abilities(trial: _Trial) -> Abilities:
    listed = listed_tokens(trial.reply) or []
    return Abilities(
        logprobs=bool(listed),
        top=min((len(token.top) for token in listed), default=0),
        n="n" in trial.body and len(read_choices(trial.reply)) == trial.body["n"],
        seed="seed" in trial.body,
        sampling={key: trial.body[key] for key in ("top_k", "min_p") if key in trial.body},
    )
