"""A stand-in for the package `vllm`: its interface, with a small transformers model behind it.

Names, arguments and results are those of vLLM 0.28 (`vllm/entrypoints/llm.py`, `sampling_params.py`, `outputs.py`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from knowgate.models.hf.model import HFModel


@dataclass
class SamplingParams:
    """The parameters that knowgate passes; an unknown one raises TypeError, as in vLLM."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True


@dataclass
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float


class LLM:
    """The offline engine."""

    def __init__(self, model: str, *, max_logprobs: int = 20, enable_prefix_caching: bool | None = None):
        self._inner = HFModel(model)
        self._max_logprobs = max_logprobs
        config = self._inner.config
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=config, max_model_len=config.max_position_embeddings)
        )
        self.batches: list[int] = []

    def get_tokenizer(self) -> Any:
        return self._inner.tokenizer

    def generate(
        self, prompts: list[Any], sampling_params: list[SamplingParams], *, use_tqdm: bool = True
    ) -> list[Any]:
        self.batches.append(len(prompts))
        pairs = zip(prompts, sampling_params, strict=True)
        return [self._answer(prompt["prompt_token_ids"], params) for prompt, params in pairs]

    def _answer(self, ids: list[int], params: SamplingParams) -> Any:
        assert (params.logprobs or 0) <= self._max_logprobs, "vLLM rejects more than max_logprobs"
        listed = None
        if params.prompt_logprobs is not None:
            rows = self._logprobs(ids)
            listed = [None, *(self._list(rows[i], params.prompt_logprobs, [ids[i + 1]]) for i in range(len(ids) - 1))]
        outputs = [self._complete(ids, params, number) for number in range(params.n)]
        return SimpleNamespace(outputs=outputs, prompt_logprobs=listed)

    def _complete(self, ids: list[int], params: SamplingParams, number: int) -> Any:
        tokens: list[int] = []
        positions = []
        draw = torch.Generator()
        draw.manual_seed(params.seed + number if params.seed is not None else draw.seed())
        while len(tokens) < (params.max_tokens or 16) and (not tokens or tokens[-1] not in self._inner.stop_ids):
            row = self._logprobs([*ids, *tokens])[-1]
            tokens.append(self._choose(row, params, draw))
            wanted = params.logprob_token_ids or []
            positions.append(self._list(row, params.logprobs or 0, [*wanted, tokens[-1]]))
        reason = "stop" if tokens[-1] in self._inner.stop_ids else "length"
        has_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
        return SimpleNamespace(
            text="", token_ids=tokens, logprobs=positions if has_logprobs else None, finish_reason=reason
        )

    def _choose(self, row: torch.Tensor, params: SamplingParams, draw: torch.Generator) -> int:
        if params.temperature == 0:
            return int(row.argmax())
        scaled = row / params.temperature
        if params.top_k > 0:
            scaled[scaled < scaled.topk(params.top_k).values[-1]] = -torch.inf
        return int(torch.multinomial(scaled.softmax(-1), 1, generator=draw))

    @torch.inference_mode()
    def _logprobs(self, ids: list[int]) -> torch.Tensor:
        rows: torch.Tensor = self._inner.loaded.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return rows

    def _list(self, row: torch.Tensor, top: int, wanted: list[int]) -> dict[int, Logprob]:
        ids = [*row.topk(min(top, len(row))).indices.tolist(), *wanted]
        return {token: Logprob(float(row[token])) for token in ids}


def install(monkeypatch: Any) -> None:
    """Make `import vllm` give the stand-in."""
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
