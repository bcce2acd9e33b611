"""Training a cross-encoder on groups: one question, its passages, one loss over them.

Knows groups and losses; not where they come from, nor where the model is kept. The loop is our own: AdamW, a linear
schedule with warm-up, clipped gradients, bf16 on a GPU, as the usual trainers have them.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.validation import MAX_COUNT, check_seed, format_value
from knowgate.errors import BadInput, BadSetting, MissingExtra, ModelError, WeightsError
from knowgate.models import embedded_weights as weights
from knowgate.retrieval.rerankers.cross_encoder import RERANKER_SUFFIXES, check_reranker_files

QUERY_TOKENS, PASSAGE_TOKENS = 128, 512  # CBDR 4.1.5, as are the rate, the weight decay and the single epoch
LOSSES = ("infonce", "listwise")


@dataclass(frozen=True)
class RankingGroup:
    """A question with passages and a label for each: 1 or 0 for InfoNCE, shifts for the listwise loss."""

    question: str
    passages: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True)
class RerankerTrainingOptions:
    """How a reranker is trained. The paper does not print its temperature or batch; 1 keeps scores ordinary logits."""

    loss: str = "infonce"
    temperature: float = 1.0
    epochs: int = 1
    batch: int = 8
    rate: float = 6e-5
    weight_decay: float = 0.01
    warm_up: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise BadSetting(f"--loss is '{self.loss}'; allowed: {', '.join(LOSSES)}.")
        check_seed(self.seed)
        for name in ("temperature", "epochs", "batch", "rate"):
            if not 0 < getattr(self, name) <= MAX_COUNT:
                raise BadSetting(f"training: {name} is {format_value(getattr(self, name))}; it must be above 0.")


@dataclass(frozen=True)
class RerankerProgress:
    """How far a training is, in groups over all epochs."""

    done: int
    total: int
    rate: float
    loss: float


@dataclass(frozen=True)
class TrainingLog:
    """Losses in the order they were logged, and how long it took."""

    losses: tuple[float, ...]
    groups: int
    seconds: float

    @property
    def first(self) -> float:
        return self.losses[0] if self.losses else math.nan

    @property
    def last(self) -> float:
        return self.losses[-1] if self.losses else math.nan


RerankerProgressCallback = Callable[[RerankerProgress], None]
MAX_GRADIENT_NORM = 1.0  # norm that gradients are clipped to


def train_groups(
    model: Any,
    groups: Sequence[RankingGroup],
    training: RerankerTrainingOptions,
    watch: RerankerProgressCallback = lambda step: None,
) -> TrainingLog:
    """Train a `CrossEncoder` in place."""
    if not groups:
        raise BadInput("there is nothing to train the reranker on: no question has positives and negatives.")
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtra("training a reranker", "train") from error
    from knowgate.training.reranker_losses import GroupLoss

    loss_of = GroupLoss(model, training.loss, training.temperature)
    steps = training.epochs * math.ceil(len(groups) / training.batch)
    learning = RerankerOptimizer.of(model, training, steps)
    losses: list[float] = []
    done, start, total = 0, time.perf_counter(), len(groups) * training.epochs
    torch.manual_seed(training.seed)
    model.train()
    try:
        for batch in shuffle_batches(groups, training):
            with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
                loss = loss_of([[group.question for group in batch], [group.passages for group in batch]],
                               [torch.tensor(group.labels) for group in batch])  # fmt: skip
            learning.step(loss)
            losses.append(float(loss.detach()))
            done += len(batch)
            watch(RerankerProgress(done, total, done / (time.perf_counter() - start), losses[-1]))
    finally:
        model.eval()
    return TrainingLog(tuple(losses), len(groups), time.perf_counter() - start)


def shuffle_batches(groups: Sequence[RankingGroup], training: RerankerTrainingOptions) -> Iterator[list[RankingGroup]]:
    """Batches of all groups, in another order in each epoch; the same ones for the same seed."""
    rng = np.random.default_rng(training.seed)
    for _ in range(training.epochs):
        order = rng.permutation(len(groups)).tolist()
        for place in range(0, len(order), training.batch):
            yield [groups[number] for number in order[place : place + training.batch]]


@dataclass(frozen=True)
class RerankerOptimizer:
    """Optimiser and schedule of one training."""

    parameters: list[Any]
    optimiser: Any
    schedule: Any

    @classmethod
    def of(cls, model: Any, training: RerankerTrainingOptions, steps: int) -> RerankerOptimizer:
        """Weight decay spares biases and norms, as is the custom; the rate rises, then falls to 0 in a line."""
        import torch

        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        plain = [one for _, one in named if one.ndim < 2]
        decayed = [one for _, one in named if one.ndim >= 2]
        optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": training.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=training.rate,
        )
        rising = round(training.warm_up * steps)

        def share(step: int) -> float:
            return step / rising if step < rising else (steps - step) / max(1, steps - rising)

        return cls([one for _, one in named], optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, share))

    def step(self, loss: Any) -> None:
        import torch

        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRADIENT_NORM)
        self.optimiser.step()
        self.schedule.step()
        self.optimiser.zero_grad(set_to_none=True)


MINILM = "minilm"
MINILM_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
MAX_SPECIAL_TOKENS = 4  # tokens that frame a pair, at most
TOKENIZER_BATCH = 1_000  # texts cut at once


def open_cross_encoder(spec: str, *, seed: int = 0, device: str | None = None) -> Any:
    """A sentence-transformers CrossEncoder with one score, its input no longer than the paper's limits."""
    if spec == MINILM:
        return _from_minilm(seed, device)
    if not Path(spec).is_dir() and "/" not in spec:
        raise WeightsError(f"the base '{spec}' is neither a folder nor a hub name (owner/model) nor '{MINILM}'.")
    return _limited(_load(spec, device, spec))


def _from_minilm(seed: int, device: str | None) -> Any:
    """MiniLM's encoder with a new head for one score: it ranks nothing until it is trained."""
    source = weights.fetch_weights(MINILM)
    with tempfile.TemporaryDirectory() as scratch:
        # the folder is a sentence embedder's; without its modules.json it is a plain encoder
        for name in MINILM_FILES:
            _put(source / name, Path(scratch) / name)
        _seed(seed)
        return _limited(_load(scratch, device, MINILM, num_labels=1, max_length=PASSAGE_TOKENS))


def _put(source: Path, target: Path) -> None:
    """A link where the system allows one, else a copy."""
    try:
        target.symlink_to(source)
    except OSError:  # Windows asks for a privilege
        shutil.copyfile(source, target)


def _load(path: str, device: str | None, name: str, **options: Any) -> Any:
    try:
        from sentence_transformers import CrossEncoder
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise MissingExtra("a cross-encoder", "train") from error
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list the new head's weights
    logging.disable_progress_bar()
    if Path(path).is_dir():
        check_reranker_files(path)
    try:
        safe = {"use_safetensors": True}
        model = CrossEncoder(path, device=device, local_files_only=Path(path).is_dir(), model_kwargs=safe, **options)
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(
            f"the cross-encoder '{name}' cannot be loaded: {error}. Give '{MINILM}', a folder or a hub name."
        ) from error
    finally:
        logging.set_verbosity(level)
    if model.num_labels != 1:
        raise ModelError(f"the cross-encoder '{name}' gives {model.num_labels} scores a pair; one is needed.")
    return model


def _limited(model: Any) -> Any:
    """Pairs are cut to the paper's 128 + 512 tokens, or to what the model reads if that is less."""
    longest = QUERY_TOKENS + PASSAGE_TOKENS + MAX_SPECIAL_TOKENS
    model.max_seq_length = min(model.max_seq_length or longest, longest)
    return model


def _seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)


def truncate_texts(model: Any, texts: Sequence[str], limit: int) -> list[str]:
    """Texts of at most `limit` tokens; shorter ones stay as they are."""
    cut: list[str] = []
    for start in range(0, len(texts), TOKENIZER_BATCH):
        part = list(texts[start : start + TOKENIZER_BATCH])
        encoded = model.tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        cut += [
            text if len(offsets) <= limit else text[: offsets[limit - 1][1]]
            for text, offsets in zip(part, encoded["offset_mapping"], strict=True)
        ]
    return cut


def save_cross_encoder(model: Any, folder: Path) -> None:
    """Config, tokenizer and safetensors; no card of its own, nothing that runs code."""
    model.save_pretrained(str(folder), create_model_card=False, safe_serialization=True)
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in RERANKER_SUFFIXES:
            path.unlink()
