"""Training a cross-encoder on groups: one question, its passages, one loss over them (sentence-transformers' trainer).

Knows groups and losses; not where they come from, nor where the model is kept.
"""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from knowgate.doors import COUNT, check_seed, shown
from knowgate.errors import BadInput, BadSetting, MissingExtra

QUERY_TOKENS, PASSAGE_TOKENS = 128, 512  # CBDR 4.1.5, as are the rate, the weight decay and the single epoch
LOSSES = ("infonce", "listwise")


@dataclass(frozen=True)
class Group:
    """A question with passages and a label for each: 1 or 0 for InfoNCE, shifts for the listwise loss."""

    question: str
    passages: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True)
class RerankTraining:
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
            if not 0 < getattr(self, name) <= COUNT:
                raise BadSetting(f"training: {name} is {shown(getattr(self, name))}; it must be above 0.")


@dataclass(frozen=True)
class RerankStep:
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


Watch = Callable[[RerankStep], None]


def train_groups(
    model: Any, groups: Sequence[Group], training: RerankTraining, watch: Watch = lambda step: None
) -> TrainingLog:
    """Train a `CrossEncoder` in place."""
    if not groups:
        raise BadInput("there is nothing to train the reranker on: no question has positives and negatives.")
    try:
        from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
        from transformers import PrinterCallback

        from datasets import Dataset
    except ModuleNotFoundError as error:
        raise MissingExtra("training a reranker", "train") from error
    from knowgate.fitting.reranker.loss import GroupLoss

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        arguments = CrossEncoderTrainingArguments(
            output_dir=scratch,
            num_train_epochs=training.epochs,
            per_device_train_batch_size=training.batch,
            learning_rate=training.rate,
            weight_decay=training.weight_decay,
            warmup_steps=round(training.warm_up * training.epochs * math.ceil(len(groups) / training.batch)),
            seed=training.seed,
            bf16=model.device.type == "cuda",
            save_strategy="no",
            logging_steps=1 if len(groups) <= 100 * training.batch else 10,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        seen = _Losses(len(groups) * training.epochs, training.batch, watch)
        trainer = CrossEncoderTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(
                {
                    "question": [group.question for group in groups],
                    "passages": [list(group.passages) for group in groups],
                    "labels": [list(group.labels) for group in groups],
                }
            ),
            loss=GroupLoss(model, training.loss, training.temperature),
        )
        trainer.add_callback(seen.callback())
        trainer.remove_callback(PrinterCallback)  # without a bar it prints every log; standard output is for data
        trainer.train()
        trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # scores come in full precision again
    model.eval()
    return TrainingLog(tuple(seen.losses), len(groups), time.perf_counter() - start)


class _Losses:
    """Keeps what the trainer logs."""

    def __init__(self, total: int, batch: int, watch: Watch) -> None:
        self.losses: list[float] = []
        self.total, self.batch, self.watch = total, batch, watch
        self.start = time.perf_counter()

    def callback(self) -> Any:
        from transformers import TrainerCallback

        keeper = self

        class Keep(TrainerCallback):  # type: ignore[misc]
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
                if logs and "loss" in logs:
                    keeper.add(state.global_step, float(logs["loss"]))

        return Keep()

    def add(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        done = min(step * self.batch, self.total)
        self.watch(RerankStep(done, self.total, done / (time.perf_counter() - self.start), loss))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The trainer's own remarks (columns, missing cards) are not for the user."""
    names = ("sentence_transformers", "datasets", "transformers", "accelerate")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
