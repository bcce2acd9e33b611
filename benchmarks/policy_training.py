"""Train the judges of the policy benchmark on a GPU, and label closed-book questions for the white-box figures.

    python policy_training.py --model FOLDER --rows FOLDER --out FOLDER [--workers 4] [--only NAME ...]

`policy_rows.py` makes the rows. A job is one training; workers take jobs in the order of the plan, and a finished job is
not repeated. Every training uses one LoRA adapter with a linear head per label position, and writes the logits of the
rows that it did not learn from. Needs torch, transformers, peft and numpy only.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import math
import multiprocessing
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDS = 4
MAX_NEW_TOKENS = 32
MAX_TOKENS_AT_ONCE = 24_000  # of the training batches of all workers together; longer batches are run in parts
CHECKPOINT_SECONDS = 40.0
STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW
LAYERS = (10, 14, 18, 21, 24, 28)
ANSWER_POSITIONS = (0, 1, 4, 16, 32)  # tokens of the answer that a white-box judge has read


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        name: Name of the judge; its members share it.
        member: Fold that is left out; -1 to train on all train rows.
        sets: Row files that it learns from.
        also: Row files whose test rows it scores besides those of `sets`.
        rows: Number of train rows; 0 for all.
        after: File in the output folder that must exist before the job starts.
        labels: Words whose difference in the output layer the heads start from.
        balanced: Weigh positive labels so that both classes count alike, at most tenfold.
        targets: Numbers of the targets that it learns; empty for all.
    """

    name: str
    member: int
    sets: tuple[str, ...]
    also: tuple[str, ...] = ()
    epochs: int = 3
    rate: float = 1e-4
    batch: int = 32
    rows: int = 0
    after: str = ""
    seed: int = 0
    labels: tuple[str, str] = (" Yes", " No")
    balanced: bool = False
    targets: tuple[int, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name}-{self.member}.npz"


def plan_jobs() -> list[Job]:
    """List all trainings, the most important first."""
    recorded = ("gpt4_nq", "llama3_8b", "chatgpt_nq", "davinci3_nq", "gpt3_realtimeqa")
    jobs = [
        Job(name, fold, (name,), ("llama4_realtimeqa", *(("gpt3_realtimeqa",) if name == "davinci3_nq" else ())))
        for name in recorded
        for fold in range(FOLDS)
    ]
    mixed = ("davinci3_nq", "gpt3_realtimeqa")
    jobs += [Job("mixed", fold, mixed, ("llama4_realtimeqa",)) for fold in range(FOLDS)]
    named = tuple(f"{name}.named" for name in recorded)
    pooled = [Job("pooled", fold, named, ("llama4_realtimeqa.named",), epochs=2) for fold in range(FOLDS)]
    return [*jobs, *pooled]


@dataclass
class Rows:
    """Token sequences with label positions and targets."""

    ids: list[np.ndarray[Any, Any]]
    positions: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]
    folds: np.ndarray[Any, Any]
    source: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0))
    index: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        return len(self.ids)


def load_rows(folder: Path, names: Sequence[str]) -> Rows:
    parts = [np.load(folder / f"{name}.npz") for name in names]
    ids: list[np.ndarray[Any, Any]] = []
    for part in parts:
        ids += np.split(part["flat"], np.cumsum(part["lengths"])[:-1])
    sizes = [len(part["lengths"]) for part in parts]
    return Rows(
        ids,
        *(np.concatenate([part[key] for part in parts]) for key in ("positions", "targets", "folds")),
        np.repeat(np.arange(len(parts)), sizes),
        np.concatenate([np.arange(size) for size in sizes]),
    )


class Judge(torch.nn.Module):
    """A base model with LoRA layers, and one linear head per label position and target."""

    def __init__(self, base: Any, yes_no: Any, n_positions: int, n_targets: int) -> None:
        super().__init__()
        self.base = base
        start = (yes_no.float() / math.sqrt(1.0)).expand(n_positions, n_targets, -1).clone()
        self.weight = torch.nn.Parameter(start)
        self.bias = torch.nn.Parameter(torch.zeros(n_positions, n_targets, device=start.device))

    def forward(self, ids: Any, positions: Any) -> Any:
        # Padding is on the right and attention is causal, so no token that is read attends to padding.
        hidden = self.base.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        states = hidden[rows, positions].float()
        return torch.einsum("bph,pth->bpt", states, self.weight) + self.bias


def make_batch(rows: Rows, indices: Sequence[int], device: str) -> tuple[Any, Any, Any]:
    length = max(len(rows.ids[i]) for i in indices)
    ids = np.zeros((len(indices), -(-length // 8) * 8), np.int64)
    for number, i in enumerate(indices):
        ids[number, : len(rows.ids[i])] = rows.ids[i]
    arrays = (ids, rows.positions[list(indices)].astype(np.int64), rows.targets[list(indices)])
    return tuple(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)


def batches_of(rows: Rows, indices: np.ndarray[Any, Any], size: int, generator: Any) -> list[list[int]]:
    """Shuffle, sort groups of eight batches by length to save padding, and shuffle the batches."""
    order = generator.permutation(indices)
    batches = []
    for start in range(0, len(order), size * 8):
        group = sorted(order[start : start + size * 8], key=lambda i: len(rows.ids[i]))
        batches += [list(group[k : k + size]) for k in range(0, len(group), size)]
    return [batches[k] for k in generator.permutation(len(batches))]


def add_adapter(model: Any, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    for module in adapted.modules():  # without this, peft keeps a 32-bit copy of every input
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def train(
    job: Job,
    model: Any,
    yes_no: Any,
    rows: Rows,
    device: str,
    say: Any,
    checkpoint: Path | None = None,
    workers: int = 1,
) -> dict[str, Any]:
    """Train one adapter and score the rows that it did not learn from; continues from its checkpoint."""
    started = time.perf_counter()
    generator = np.random.default_rng(1000 * job.seed + job.member + 1)
    rows = keep_targets(rows, job.targets)
    is_labeled = ~np.isnan(rows.targets).all(axis=1)
    indices = np.flatnonzero((rows.folds >= 0) & (rows.folds != job.member) & is_labeled)
    if job.rows and job.rows < len(indices):
        indices = np.sort(generator.permutation(indices)[: job.rows])
    base = add_adapter(model, 17 + job.member + 100 * job.seed)
    judge = Judge(base, yes_no, rows.positions.shape[1], rows.targets.shape[1])
    parameters = [parameter for parameter in judge.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=job.rate, weight_decay=0.01, fused=device == "cuda")
    schedule = [batch for _ in range(job.epochs) for batch in batches_of(rows, indices, job.batch, generator)]
    warmup, losses = max(1, len(schedule) // 16), []
    positive_weights = weigh_positives(rows.targets[indices], job.balanced).to(device)
    first = load_checkpoint(checkpoint, parameters, optimizer, device)
    if first:
        say(f"{job.name}-{job.member} continues after {first} of {len(schedule)} steps")
    saved = time.perf_counter()
    judge.train()
    for step, batch in enumerate(schedule[first:], start=first):
        rate = min((step + 1) / warmup, (len(schedule) - step) / max(1, len(schedule) - warmup))
        for group in optimizer.param_groups:
            group["lr"] = job.rate * rate
        losses.append(torch.zeros((), device=device))
        for part in split_batch(rows, batch, MAX_TOKENS_AT_ONCE // workers):
            ids, positions, targets = make_batch(rows, part, device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = judge(ids, positions)
            loss = compute_loss(logits.float(), targets[:, None, :].expand_as(logits), positive_weights)
            loss = loss * (len(part) / len(batch))
            loss.backward()
            losses[-1] += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        is_due = time.perf_counter() - saved > CHECKPOINT_SECONDS and step + 1 < len(schedule)
        if checkpoint is not None and is_due:
            save_checkpoint(checkpoint, parameters, optimizer, step + 1)
            saved = time.perf_counter()
        if step % 100 == 99:
            recent = float(torch.stack(losses[-100:]).mean())
            say(f"{job.name}-{job.member} {step + 1}/{len(schedule)} loss {recent:.4f}")
    means = [float(torch.stack(part).mean()) for part in _thirds(losses, job.epochs)]
    trained = time.perf_counter() - started
    wanted = np.flatnonzero((rows.folds < 0) | (rows.folds == job.member))
    logits = score(judge, rows, wanted, device)
    facts = {
        "seconds": round(trained, 1),
        "scoring_seconds": round(time.perf_counter() - started - trained, 1),
        "losses": [round(value, 4) for value in means],
        "rows": len(indices),
        "steps": len(schedule),
        **({"continued_after": first} if first else {}),
    }
    base.unload()
    return {"wanted": wanted, "logits": logits, "facts": facts}


def keep_targets(rows: Rows, targets: Sequence[int]) -> Rows:
    """Remove the targets that a job does not learn; without a choice, keep all."""
    if not targets:
        return rows
    is_learned = np.isin(np.arange(rows.targets.shape[1]), targets)
    return replace(rows, targets=np.where(is_learned, rows.targets, np.nan).astype(np.float32))


def split_batch(rows: Rows, batch: Sequence[int], max_tokens: int) -> list[Sequence[int]]:
    """Split a batch into parts of at most `max_tokens` tokens, with padding."""
    longest = max(len(rows.ids[index]) for index in batch)
    size = max(1, max_tokens // longest)
    return [batch[start : start + size] for start in range(0, len(batch), size)]


def save_checkpoint(file: Path, parameters: Sequence[Any], optimizer: Any, step: int) -> None:
    """Save weights and optimizer state after a number of steps."""
    from safetensors.torch import save_file

    tensors = {"step": torch.tensor(step)}
    for number, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        tensors |= {f"{number}.{key}": state[key].clone() for key in STATE_KEYS} | {f"{number}.value": parameter.data}
    save_file(tensors, file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)


def load_checkpoint(file: Path | None, parameters: Sequence[Any], optimizer: Any, device: str) -> int:
    """Load weights and optimizer state; returns the number of finished steps, 0 without a checkpoint."""
    from safetensors.torch import load_file

    if file is None or not file.exists():
        return 0
    tensors = load_file(file, device)
    for number, parameter in enumerate(parameters):
        parameter.data.copy_(tensors[f"{number}.value"])
        optimizer.state[parameter] = {key: tensors[f"{number}.{key}"] for key in STATE_KEYS}
    return int(tensors["step"])


def weigh_positives(targets: np.ndarray[Any, Any], balanced: bool) -> Any:
    """Return the weight of positive labels of each target: 1, or what makes both classes count alike."""
    share = np.clip(np.nanmean(targets, axis=0), 1e-3, 1 - 1e-3)
    return torch.from_numpy(np.clip((1 - share) / share, 1, 10) if balanced else np.ones_like(share)).float()


def compute_loss(logits: Any, targets: Any, positive_weights: Any) -> Any:
    """Return the mean binary cross-entropy of the targets that are not NaN."""
    is_labeled = ~targets.isnan()
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, targets.nan_to_num(), reduction="none", pos_weight=positive_weights
    )
    return (losses * is_labeled).sum() / is_labeled.sum().clamp(min=1)


def _thirds(losses: list[Any], epochs: int) -> list[list[Any]]:
    size = max(1, len(losses) // epochs)
    return [losses[k * size : (k + 1) * size] or losses[-1:] for k in range(epochs)]


@torch.inference_mode()
def score(judge: Judge, rows: Rows, wanted: np.ndarray[Any, Any], device: str) -> np.ndarray[Any, Any]:
    judge.eval()
    order = sorted(wanted.tolist(), key=lambda i: len(rows.ids[i]))
    values = np.zeros((len(rows), rows.positions.shape[1], rows.targets.shape[1]), np.float32)
    for start in range(0, len(order), 128):
        indices = order[start : start + 128]
        ids, positions, _ = make_batch(rows, indices, device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            values[indices] = judge(ids, positions).float().cpu().numpy()
    return values[wanted]


def do_job(job: Job, model: Any, tokenizer: Any, options: argparse.Namespace, say: Any) -> None:
    folder = options.out if (options.out / f"{job.sets[0]}.npz").exists() else options.rows
    learned = load_rows(folder, job.sets)
    rows = learned
    if job.also:
        both = load_rows(folder, (*job.sets, *job.also))
        if len(np.unique(both.source)) > len(job.sets):  # rows of `also` are scored, never learned from
            both.folds = np.where(both.source >= len(job.sets), -1, both.folds)
        rows = both
    first, second = (tokenizer.encode(word, add_special_tokens=False)[0] for word in job.labels)
    direction = (model.lm_head.weight[first] - model.lm_head.weight[second]).detach()
    checkpoint = options.out / f"{job.name}-{job.member}.safetensors"
    result = train(job, model, direction, rows, options.device, say, checkpoint, options.workers)
    wanted = result["wanted"]
    temporary = options.out / f".{job.file}"
    np.savez_compressed(
        temporary,
        source=rows.source[wanted].astype(np.int8),
        index=rows.index[wanted].astype(np.int32),
        logits=result["logits"].astype(np.float32),
        sets=np.array([*job.sets, *job.also]),
        facts=np.array(json.dumps({**result["facts"], "epochs": job.epochs, "rate": job.rate, "batch": job.batch})),
    )
    temporary.replace(options.out / job.file)
    checkpoint.unlink(missing_ok=True)


# --- closed-book answers of the LLM itself --------------------------------------------------------


@torch.inference_mode()
def label_closed_book(model: Any, options: argparse.Namespace, say: Any) -> None:
    """Answer closed-book questions greedily, grade them, and record token statistics and hidden states."""
    from transformers import AutoTokenizer

    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    data = np.load(options.rows / "closed_book.npz")
    prompts = np.split(data["flat"], np.cumsum(data["lengths"])[:-1])[: options.limit]
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    states = np.zeros((len(prompts), 2, len(options.layers), model.config.hidden_size), np.float16)
    features = np.zeros((len(prompts), 10), np.float32)
    for start in range(0, len(order), options.generate):
        indices = order[start : start + options.generate]
        texts = generate(model, [prompts[i] for i in indices], ends, options.device)
        for i, text in zip(indices, texts, strict=True):
            answers[i] = text
        for part in range(0, len(indices), 128):
            some = indices[part : part + 128]
            features[some], states[some] = read_states(model, some, prompts, answers, options, ends)
        if start // options.generate % 8 == 0:
            say(f"closed book {start + len(indices)}/{len(order)} {time.perf_counter() - started:.0f} s")
    texts = tokenizer.batch_decode([[t for t in answer if t not in ends] for answer in answers])
    write_closed_book(options, data, prompts, answers, [text.strip() for text in texts], ends)
    np.save(options.out / "states.npy", states)
    np.savez_compressed(options.out / "closed_features.npz", features=features)
    (options.out / "closed_book.done").write_text(f"{time.perf_counter() - started:.1f}")


def generate(model: Any, prompts: Sequence[Any], ends: list[int], device: str) -> list[list[int]]:
    length = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), length), np.int64)
    mask = np.zeros((len(prompts), length), np.int64)
    for number, prompt in enumerate(prompts):
        ids[number, length - len(prompt) :] = prompt
        mask[number, length - len(prompt) :] = 1
    output = model.generate(
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=torch.from_numpy(mask).to(device),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        repetition_penalty=1.0,
        temperature=None,
        top_p=None,
        top_k=None,
        eos_token_id=ends,
        pad_token_id=ends[-1],
    )
    texts = []
    for row in output[:, length:].tolist():
        stop = next((k for k, token in enumerate(row) if token in ends), None)
        texts.append(row if stop is None else row[: stop + 1])
    return texts


def read_states(
    model: Any, some: Sequence[int], prompts: Any, answers: Any, options: argparse.Namespace, ends: list[int]
) -> tuple[Any, Any]:
    """Run prompt and answer once more: statistics of the answer tokens, states before and after the answer."""
    full = [np.concatenate([prompts[i], np.array(answers[i], np.int32)]) for i in some]
    ids = np.zeros((len(full), max(map(len, full))), np.int64)
    for number, row in enumerate(full):
        ids[number, : len(row)] = row
    batch = torch.from_numpy(ids).to(options.device)
    outcome = model.model(input_ids=batch, use_cache=False, output_hidden_states=True)
    features, pre_post = [], []
    rows = torch.arange(len(full), device=batch.device)
    first = torch.tensor([len(prompts[i]) - 1 for i in some], device=batch.device)
    last = torch.tensor([len(row) - 1 for row in full], device=batch.device)
    for where in (first, last):
        pre_post.append(torch.stack([outcome.hidden_states[layer][rows, where] for layer in options.layers], 1))
    for number, i in enumerate(some):
        begin, end = len(prompts[i]) - 1, len(full[number]) - 1
        logits = model.lm_head(outcome.last_hidden_state[number, begin:end]).float()
        logs = torch.log_softmax(logits, -1)
        chosen = logs.gather(1, batch[number, begin + 1 : end + 1, None])[:, 0]
        entropy = -(logs.exp() * logs).sum(-1)
        top = logs.exp().topk(2, -1).values
        margin = top[:, 0] - top[:, 1]
        is_open = float(answers[i][-1] not in ends)
        size = float(len(answers[i]))
        values = [chosen[0], chosen.mean(), chosen.min(), chosen.sum(), entropy.mean(), entropy.max(), entropy[0]]
        values += [margin.mean(), margin.min()]
        features.append(torch.stack([*values, torch.tensor(size + 100 * is_open, device=batch.device)]))
    return (
        torch.stack(features).float().cpu().numpy(),
        torch.stack(pre_post, 1).half().cpu().numpy(),
    )


def write_closed_book(
    options: argparse.Namespace, data: Any, prompts: Any, answers: Any, texts: list[str], ends: list[int]
) -> None:
    """Grade the answers; write the rows that the white-box judges learn from."""
    from knowgate.core.text import grade_contains
    from knowgate.types import Question

    with gzip.open(options.rows / "closed_book.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][: len(prompts)]
    right = [
        grade_contains(text, Question(row["question"], answers=tuple(row["answers"]))).correct
        for row, text in zip(rows, texts, strict=True)
    ]
    folds, groups = data["folds"][: len(rows)], data["group"][: len(rows)]
    full = [
        np.concatenate([prompt, np.array(answer, np.int32)]) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    starts = np.array([len(prompt) - 1 for prompt in prompts])
    sizes = np.array([len(answer) for answer in answers])
    positions = np.stack([starts + np.minimum(count, sizes) for count in ANSWER_POSITIONS], 1)
    targets = np.array(right, np.float32)[:, None]
    for name, keep in (
        ("white_box", np.arange(len(rows))),
        ("white_box_triviaqa", np.flatnonzero(groups == 0)),
        ("white_box_nq", np.flatnonzero(groups == 1)),
    ):
        np.savez_compressed(
            options.out / f"{name}.npz",
            flat=np.concatenate([full[i] for i in keep]),
            lengths=np.array([len(full[i]) for i in keep], np.int32),
            positions=positions[keep].astype(np.int32),
            targets=targets[keep],
            folds=folds[keep],
            group=groups[keep],
        )


# --- workers --------------------------------------------------------------------------------------


def open_model(options: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16 if options.device == "cuda" else torch.float32
    ).to(options.device)
    model.requires_grad_(False)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    return model, tokenizer


def work(number: int, options: argparse.Namespace) -> None:
    log = (options.out / f"worker-{number}.log").open("a", encoding="utf-8")

    def say(text: str) -> None:
        line = f"{time.time() - options.started:.0f} s {text}"
        log.write(line + "\n")
        log.flush()
        print(f"worker {number}: {line}", flush=True)

    try:
        model, tokenizer = open_model(options)
        say("model loaded")
        if number == 0 and not (options.out / "closed_book.done").exists() and options.label:
            label_closed_book(model, options, say)
            torch.cuda.empty_cache()
            say("closed book done")
        if number == 0 and options.after_labels:
            options.after_labels(options, tokenizer, say)
        while (job := take_job(options)) is not None:
            start = time.time()
            try:
                do_job(job, model, tokenizer, options, say)
                say(f"{job.file} done in {time.time() - start:.1f} s")
            except Exception:  # noqa: BLE001 (the next job is not to suffer)
                say(traceback.format_exc()[-600:])
                del model
                gc.collect()
                torch.cuda.empty_cache()
                (options.out / f"{job.file}.claim").unlink(missing_ok=True)
                time.sleep(5)
                model, tokenizer = open_model(options)
        say("no job left")
    except Exception:  # noqa: BLE001 (written to the log)
        say(traceback.format_exc())


def take_job(options: argparse.Namespace) -> Job | None:
    """Claim the next job whose requirements exist; wait for requirements if nothing else is left."""
    while True:
        waiting = False
        for job in options.plan:
            if (options.out / job.file).exists():
                continue
            if job.after and not (options.out / job.after).exists():
                waiting = True
                continue
            try:
                (options.out / f"{job.file}.claim").touch(exist_ok=False)
            except FileExistsError:
                continue
            return job
        if not waiting or not options.label:
            return None
        time.sleep(1)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the arguments of all trainings."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--skip-labels", dest="label", action="store_false")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--generate", type=int, default=768, help="questions answered at a time")
    parser.add_argument("--layers", type=int, nargs="*", default=list(LAYERS))
    parser.add_argument("--limit", type=int, help="closed-book questions, for rehearsals")
    parser.add_argument("--rehearse", action="store_true", help="train few rows of each job")
    parser.set_defaults(after_labels=None)
    return parser


def start_workers(options: argparse.Namespace, plan: Sequence[Job]) -> list[Any]:
    """Start the worker processes on the jobs of a plan."""
    options.out.mkdir(parents=True, exist_ok=True)
    options.started = time.time()
    options.plan = [job for job in plan if not options.only or job.name in options.only]
    if options.rehearse:
        options.plan = [Job(**{**vars(job), "rows": 24, "epochs": 1}) for job in options.plan]
    for claim in options.out.glob("*.claim"):
        claim.unlink()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(number, options)) for number in range(options.workers)]
    for process in processes:
        process.start()
    return processes


def main() -> None:
    options = make_parser(__doc__).parse_args()
    for process in start_workers(options, plan_jobs()):
        process.join()
    (options.out / "all.done").write_text(f"{time.time() - options.started:.0f}")


if __name__ == "__main__":
    main()
