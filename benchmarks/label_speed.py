"""Questions labeled per second in whole runs, beside plain `generate`, with a profile and the share of GPU time in use.

    python -m benchmarks.label_speed --model hf:FOLDER --data jsonl:QUESTIONS --index CORPUS.jsonl --out FOLDER
    python -m benchmarks.label_speed --model fake --data jsonl:QUESTIONS --index CORPUS.jsonl --out FOLDER

Three settings are measured: closed book, BM25 without samples, and BM25 with 20 closed-book samples. Each one labels
into a run folder as `knowgate label` does: searches, grades and writes rows. A few questions that do not count warm up
the model. For a transformers model, a loop of single `generate` calls answers the same prompts for some seconds, and the
speed is also given as a ratio to that loop. The last step profiles one more run on the host (cProfile). With --threads,
threads of this process search and grade, instead of worker processes; use another OUT folder for that.

Results are written to OUT/record.json after every step. Run the same command again to continue after an interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import platform
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP = 64  # questions
PROFILED = 1_024  # questions
PLAIN_SECONDS = 8.0  # duration of the loop of `generate` calls for each setting
PLAIN_TOKENS = 32  # maximum length of an answer, the default of `label`


@dataclass(frozen=True)
class Setting:
    """What one run records, and how many questions it labels relative to `--questions`."""

    name: str
    closed_book: bool = False
    samples: int = 0
    share: float = 1.0

    def options(self, index: Path) -> dict[str, Any]:
        """Return the arguments of `label`."""
        source = {"closed_book": True} if self.closed_book else {"index": str(index)}
        return {"samples": self.samples, "open_samples": 0, **source}


SETTINGS = (
    Setting("closed book", closed_book=True, share=4 / 3),
    Setting("BM25"),
    Setting("BM25, 20 samples", samples=20, share=2 / 3),
)


# --- measurements ---------------------------------------------------------------------------------


@contextlib.contextmanager
def watch_gpu() -> Iterator[list[float]]:
    """Collect the share of time that the GPU is busy (0 to 1) every 200 ms; stays empty without nvidia-smi."""
    shares: list[float] = []
    if shutil.which("nvidia-smi") is None:
        yield shares
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield shares
        finally:
            process.terminate()
            output, _ = process.communicate()
            shares += [int(line) / 100 for line in output.split() if line.isdigit()]


def measure_run(model: Any, questions: Sequence[Any], setting: Setting, index: Path) -> dict[str, Any]:
    """Label questions into a temporary folder, and return the speed, host time and GPU use."""
    from knowgate.labels.labeling import label

    with tempfile.TemporaryDirectory() as folder:
        start, used = time.perf_counter(), time.process_time()
        with watch_gpu() as shares:
            label(questions, out=Path(folder, "run"), model=model, **setting.options(index))
        seconds, host = time.perf_counter() - start, time.process_time() - used
    return {
        "questions": len(questions),
        "seconds": round(seconds, 2),
        "questions_per_second": round(len(questions) / seconds, 1),
        "host_ms_per_question": round(1000 * host / len(questions), 3),
        "gpu_busy": round(statistics.fmean(shares), 3) if shares else None,
        "gpu_memory_share": measure_memory(model),
    }


def measure_memory(model: Any) -> float | None:
    """Return the largest share of the GPU's memory that this process has held; None without a GPU."""
    import torch

    if not hasattr(model, "loaded") or model.loaded.device.type != "cuda":
        return None
    return round(torch.cuda.max_memory_reserved() / torch.cuda.mem_get_info()[1], 3)


def measure_generate(model: Any, questions: Sequence[Any], setting: Setting, index: Path) -> float:
    """Return how many questions per second a loop of single `generate` calls of transformers answers."""
    import torch

    from knowgate.models.prompts.answers import AnswerPrompts
    from knowgate.retrieval import load_retriever

    prompts, retriever = AnswerPrompts(), None if setting.closed_book else load_retriever(str(index))

    def answer(question: Any) -> None:
        texts = [(prompts.closed(question).text, setting.samples)]
        if retriever is not None:
            texts.append((prompts.open(question, retriever.search([question.text], 3)[0]).text, 0))
        for text, samples in texts:
            ids = torch.tensor([model.tokenize(model.render(text))], device=model.loaded.device)
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": PLAIN_TOKENS}
            with torch.inference_mode():
                model.loaded.model.generate(ids, do_sample=False, pad_token_id=model.pad_id, **options)
                if samples:
                    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
                    model.loaded.model.generate(
                        ids, num_return_sequences=samples, pad_token_id=model.pad_id, **sampling, **options
                    )

    answer(questions[0])
    start, n_done = time.perf_counter(), 0
    while time.perf_counter() - start < PLAIN_SECONDS:
        answer(questions[n_done % len(questions)])
        n_done += 1
    return n_done / (time.perf_counter() - start)


def profile_run(model: Any, questions: Sequence[Any], setting: Setting, index: Path) -> dict[str, list[str]]:
    """Profile the thread that runs the model; return the costliest functions by own and by total time."""
    from knowgate.labels.labeling import label

    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        profiler.runcall(label, questions, out=Path(folder, "run"), model=model, **setting.options(index))
    stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    ours = {key: value for key, value in stats.items() if "knowgate" in key[0]}
    return {"own time": list_top_functions(stats, 2, 10), "total time": list_top_functions(ours, 3, 25)}


def list_top_functions(stats: dict[Any, Any], column: int, n: int) -> list[str]:
    """Return lines 'seconds, calls, function' of the `n` entries with the largest value in a column."""
    top = sorted(stats.items(), key=lambda entry: -entry[1][column])[:n]
    return [
        f"{values[column]:8.2f} s {values[1]:>9} calls  {Path(file).name}:{line} {function}"
        for (file, line, function), values in top
    ]


# --- the steps of a run ---------------------------------------------------------------------------


class Record:
    """The results so far, in a JSON file; a step that is already in the file is not run again."""

    def __init__(self, path: Path):
        self.path = path
        self.results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def step(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a step from the file, or else run it and add its result to the file."""
        if name not in self.results:
            self.results[name] = work(*args)
            self.path.write_text(json.dumps(self.results, indent=1))
        return self.results[name]


def open_index(source: Path, folder: Path) -> Path:
    """Return the folder of the index; a JSONL corpus is indexed first."""
    from knowgate.retrieval.index import build_index

    if source.is_dir():
        return source
    build_index(source, folder / "index")
    return folder / "index"


def describe_machine(model: Any) -> dict[str, str]:
    import torch

    is_gpu = hasattr(model, "loaded") and model.loaded.device.type == "cuda"
    device = torch.cuda.get_device_name() if is_gpu else platform.processor() or platform.machine()
    return {"model": model.name, "device": device, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model spec: hf:FOLDER, gguf:FILE or fake")
    parser.add_argument("--data", required=True, help="jsonl:FILE or bench:NAME/SPLIT")
    parser.add_argument("--index", required=True, type=Path, help="index folder, or JSONL file of passages to index")
    parser.add_argument("--out", required=True, type=Path, help="folder of the record; continues what it holds")
    parser.add_argument("--questions", type=int, default=3_000)
    parser.add_argument("--threads", action="store_true", help="search and grade in threads, without worker processes")
    parser.add_argument("--settings", nargs="+", choices=[setting.name for setting in SETTINGS], help="default: all")
    parser.add_argument("--speed-only", action="store_true", help="neither run plain `generate` nor profile")
    options = parser.parse_args()
    from knowgate.data.questions import load_questions
    from knowgate.labels import worker_processes
    from knowgate.models import load_model

    if options.threads:
        worker_processes.MIN_QUESTIONS = sys.maxsize
    settings = [setting for setting in SETTINGS if options.settings is None or setting.name in options.settings]
    options.out.mkdir(parents=True, exist_ok=True)
    record, index = Record(options.out / "record.json"), open_index(options.index, options.out)
    questions, model = load_questions(options.data), load_model(options.model)
    print(record.step("machine", describe_machine, model), flush=True)
    for setting in settings:
        chosen = questions[: round(setting.share * options.questions)]
        run = record.step(setting.name, warm_up_and_measure, model, chosen, setting, index)
        print(f"{setting.name}: {run}", flush=True)
        if hasattr(model, "loaded") and not options.speed_only:
            plain = record.step(f"{setting.name}, generate", measure_generate, model, chosen, setting, index)
            ratio = run["questions_per_second"] / plain
            print(f"  plain generate: {plain:.2f} questions/s, so label is {ratio:.1f} x as fast", flush=True)
    for setting in settings:
        if setting.closed_book or options.speed_only:
            continue
        profile = record.step(f"{setting.name}, profile", profile_run, model, questions[:PROFILED], setting, index)
        for name, lines in profile.items():
            print(f"{setting.name}, {name}:", *lines, sep="\n  ", flush=True)


def warm_up_and_measure(model: Any, questions: Sequence[Any], setting: Setting, index: Path) -> dict[str, Any]:
    measure_run(model, questions[:WARM_UP], setting, index)
    return measure_run(model, questions, setting, index)


if __name__ == "__main__":
    main()
