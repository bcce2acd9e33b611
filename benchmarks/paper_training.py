"""Train the models of three papers on a GPU: IK on 20,000 closed-book answers of the LLM itself, KBM, CBDR's reranker.

    python -m benchmarks.paper_training --model FOLDER --tokenizer FOLDER --rows FOLDER --out FOLDER [--pack FILE]

`policy_rows`, `kbm_rows`, `kbm_samples` and `cbdr_alignment` make the rows. One worker answers the closed-book questions,
which only IK needs, while the others teach KBM. A second call continues: finished trainings are not repeated. After
`--seconds` the workers are stopped, and `--pack` writes all results so far into one file. To continue elsewhere, unpack
it into `--out`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policy_probes import fit_probes
from benchmarks.policy_training import Job, make_parser, start_workers

TOKENS = (0, 1, 4, 16, 32)  # tokens of the answer that IK reads (T in the paper)
SEEDS = 5
TRAINED, HELD_OUT = 0, 1  # held-out train rows: the stack is fitted on them
PACKED = ("*.npz", "*.done", "*.log", "*.json")
LARGE = ("ik_rows_*",)  # can be made again from the answers


def plan_jobs() -> list[Job]:
    """List the trainings, the most important first."""
    kbm: dict[str, Any] = {"labels": ("True", "False"), "sets": ("kbm_rows",), "member": -1, "rate": 1e-4}
    return [
        Job("kbm_3_epochs", epochs=3, balanced=True, **kbm),
        Job("kbm_1_epoch", epochs=1, **kbm),
        *(_plan_ik(tokens, seed) for seed in range(3) for tokens in (32, 0)),
        *(_plan_ik(tokens, 0) for tokens in (4, 16, 1)),
        *(_plan_ik(tokens, seed) for seed in range(3, SEEDS) for tokens in (32, 0)),
        *_plan_kbm_with_30_samples(),
        *_plan_rerankers(),
    ]


def _plan_kbm_with_30_samples() -> list[Job]:
    """List the judges that `kbm_samples` prepares; they start after its labels."""
    kbm: dict[str, Any] = {"labels": ("True", "False"), "sets": ("kbm30_rows",), "member": -1, "batch": 64}
    return [Job("kbm30_3_epochs", epochs=3, balanced=True, **kbm), Job("kbm30_1_epoch", epochs=1, **kbm)]


def _plan_rerankers() -> list[Job]:
    """List CBDR's rerankers with a larger base, whose rows `cbdr_alignment` prepares."""
    reranker: dict[str, Any] = {"sets": ("rerank_rows",), "member": HELD_OUT, "epochs": 1, "rate": 2e-4, "batch": 64}
    return [
        Job("rerank_aligned_seed0", targets=(0, 1, 2), **reranker),
        Job("rerank_relevance", targets=(0,), **reranker),
        Job("rerank_margin_seed0", targets=(0, 3, 4), **reranker),
        *(Job(f"rerank_aligned_seed{seed}", targets=(0, 1, 2), seed=seed, **reranker) for seed in (1, 2)),
    ]


def _plan_ik(tokens: int, seed: int) -> Job:
    name = f"ik_{tokens}_seed{seed}"
    labels = ("Yes", "No")
    sets = (f"ik_rows_{tokens}",)
    return Job(name, HELD_OUT, sets, epochs=1, batch=32, rate=1e-4, after="ik.done", seed=seed, labels=labels)


def write_ik_rows(options: argparse.Namespace, tokenizer: Any, say: Any) -> None:
    """Write IK's prompts for every number of answer tokens; the answers come from `label_closed_book`."""
    from knowgate.models.prompts.questions import build_ik_prompt
    from knowgate.types import Question

    if all((options.out / f"ik_rows_{tokens}.npz").exists() for tokens in TOKENS):
        (options.out / "ik.done").touch()
        return
    answered = np.load(options.out / "white_box.npz")
    lengths = answered["lengths"]
    sequences = np.split(answered["flat"], np.cumsum(lengths)[:-1])
    starts = answered["positions"][:, 0] + 1
    folds = np.load(options.rows / "closed_book.npz")["held_out"][: len(lengths)]
    folds = np.where(answered["folds"] < 0, -1, np.where(folds, HELD_OUT, TRAINED))
    with gzip.open(options.rows / "closed_book.jsonl.gz", "rt", encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line in lines][: len(lengths)]
    for tokens in TOKENS:
        parts = [row[start : start + tokens] for row, start in zip(sequences, starts, strict=True)]
        drafts = tokenizer.batch_decode(parts, skip_special_tokens=True)
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": build_ik_prompt(Question(question, lang="en"), draft.strip())}],
                add_generation_prompt=True,
                tokenize=False,
            )
            for question, draft in zip(questions, drafts, strict=True)
        ]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        sizes = np.array([len(each) for each in ids], np.int32)
        np.savez_compressed(
            options.out / f"ik_rows_{tokens}.npz",
            flat=np.concatenate([np.array(each, np.int32) for each in ids]),
            lengths=sizes,
            positions=sizes[:, None] - 1,
            targets=answered["targets"],
            folds=folds,
        )
        say(f"IK, {tokens} answer tokens: {len(ids)} prompts of {sizes.mean():.0f} tokens")
    (options.out / "ik.done").touch()


def pack_results(out: Path, file: Path) -> None:
    """Write all results so far into one file; nothing happens if there is nothing new."""
    large = {path for pattern in LARGE for path in out.glob(pattern)}
    results = sorted({path for pattern in PACKED for path in out.glob(pattern)} - large)
    results = [path for path in results if not path.name.startswith(".")]
    if file.exists() and all(path.stat().st_mtime < file.stat().st_mtime for path in results):
        return
    temporary = file.with_name(f".{file.name}")
    with tarfile.open(temporary, "w") as archive:
        for path in results:
            archive.add(path, path.name)
    temporary.replace(file)
    print(f"packed {len(results)} files, {file.stat().st_size / 2**20:.1f} MiB", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=550, help="stop the workers after this time")
    parser.add_argument("--pack", type=Path, help="file for all results so far")
    parser.set_defaults(after_labels=write_ik_rows)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ik.done").unlink(missing_ok=True)
    jobs = plan_jobs()
    if options.only:  # in the order in which they are named
        jobs = [job for name in options.only for job in jobs if job.name == name]
    if not any(job.after for job in jobs):  # only IK needs the closed-book answers
        options.label, options.after_labels = False, None
    if not any((options.out / name).exists() for name in ("probes.npz", "states.npy")):
        (options.out / "closed_book.done").unlink(missing_ok=True)  # the probes need hidden states: answer again
    processes = start_workers(options, jobs)
    if options.label:
        probes = multiprocessing.get_context("spawn").Process(target=fit_probes, args=(options.out, options.device))
        probes.start()
        processes.append(probes)
    end = time.time() + options.seconds
    while any(process.is_alive() for process in processes) and time.time() < end:
        time.sleep(min(5, options.seconds / 10))
        if options.pack:
            pack_results(options.out, options.pack)
    for process in processes:
        process.terminate()
        process.join()
    missing = [job.file for job in options.plan if not (options.out / job.file).exists()]
    print(f"missing: {', '.join(missing) or 'nothing'}", flush=True)
    if options.pack:
        pack_results(options.out, options.pack)


if __name__ == "__main__":
    main()
