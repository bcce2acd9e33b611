"""Preference runs: measure which passages help the LLM to answer labeled questions, and write the results to a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import model_validator

from knowgate.core.files import atomic_file
from knowgate.core.options import Count, Options, Seed, option, with_options
from knowgate.data.preferences import DEFAULT_TOP, PAIRS_FILE, Preference, PreferenceFolder, to_cbdr_record
from knowgate.data.questions import load_questions
from knowgate.data.runs.folder import RunFolder, RunsLike, resolve_run_paths
from knowgate.data.runs.storage import question_from_row
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import load_gate
from knowgate.gates.hidden_state import ProbeGate
from knowgate.labels.grading import load_grader
from knowgate.labels.local_runner import LocalRunner
from knowgate.labels.ray_runner import connect_early, create_ray_runner, is_remote_runner, require_name
from knowgate.labels.run import describe_environment, fingerprint_questions
from knowgate.models import load_model, resolve_model
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.retrieval import load_retriever
from knowgate.training import passage_effects
from knowgate.types import Model, Question, Retriever, Runner

# CBDR uses confidence, but ordering passages by it leads to fewer right answers than the retriever's order, while
# ordering by likelihood leads to 5 to 21 points more (1,000 questions, Qwen2.5-Coder-1.5B: benchmarks/runs/cbdr).
DEFAULT_SOURCE = "likelihood"
LOCAL_PREFERENCE_RUNNER = LocalRunner(
    largest=256
)  # a question has about 20 prompts, and a GPU reads thousands in seconds


class PreferenceOptions(Options):
    """Options of `measure_preferences`."""

    source: Literal["likelihood", "benefit", "confidence"] | None = option(
        None,
        "How the effect of a passage is measured: `likelihood` (it makes the gold answer more likely), "
        "`benefit` (the answer with it is right) or `confidence` (it raises the LLM's confidence, which the probe "
        f"`gate` measures, as in the CBDR paper). Default: confidence if `gate` is given, else {DEFAULT_SOURCE}.",
    )
    gate: str | None = option(None, "Folder of a fitted probe that measures the LLM's confidence.", metavar="PROBE")
    index: str | None = option(
        None,
        "Where to search for candidate passages: an index folder, a search endpoint (`http:` before its URL) "
        "or a search engine.",
    )
    data: str | None = option(
        None, "Questions with candidate passages, such as jsonl:FILE. Default: the questions of the label run."
    )
    candidates: int = option(20, "Number of candidate passages per question.", ge=2)
    top: Count = option(
        DEFAULT_TOP, "For each question, keep at most this many helpful passages and this many other passages."
    )
    cut: Count | None = option(
        None,
        "Truncate all candidates to this many tokens and leave out shorter candidates. This control shows whether length "
        "alone matters.",
    )
    split: Literal["train", "dev", "test"] | None = option(
        None, "Assign all questions to this split: `train`, `dev` or `test`. Default: split as `knowgate fit` does."
    )
    limit: Count | None = option(None, "Maximum number of questions to use.")
    seed: Seed = option(0, "Random seed of the division into splits.")
    runner: Any = option(
        None,
        "Where the LLM runs: `local` (this process), `ray:local` (Ray on this machine), `ray` (a running "
        "cluster) or ray:HOST:PORT.",
        metavar="local|ray[:ADDRESS]",
    )

    @model_validator(mode="after")
    def _check_candidates(self) -> PreferenceOptions:
        """Raise BadSetting if two sources of candidate passages are given."""
        if self.index and self.data:
            raise BadSetting("`index` and `data` are mutually exclusive: give only one source of candidate passages.")
        return self


@dataclass(frozen=True)
class PreferenceProgress:
    """The progress of a preference run.

    Attributes:
        total: Questions of the run.
        done: Questions that have a row.
        kept: Rows with both positive and negative passages; only these can train a reranker.
        one_sided: Rows whose candidate passages include no positive passage, or no negative passage.
        bare: Rows without candidate passages.
        failed: Rows with an error. They count as done, but not as kept, one_sided or bare.
        duplicates: Duplicate passages that were dropped.
        cut: Passages shortened to fit the context window.
        prompts: Prompts that the LLM has read since the run was started or continued.
        seconds: Seconds since the run was started or continued.
    """

    total: int
    done: int = 0
    kept: int = 0
    one_sided: int = 0
    bare: int = 0
    failed: int = 0
    duplicates: int = 0
    cut: int = 0
    prompts: int = 0
    seconds: float = 0.0

    def add(self, rows: Sequence[Preference], *, is_fresh: bool = True, seconds: float = 0.0) -> PreferenceProgress:
        """Return the progress after more rows.

        One-sided rows have only positive or only negative passages. Bare rows have no passages.

        Args:
            rows: The rows to count.
            is_fresh: False for rows of an earlier, interrupted run.
            seconds: Seconds since the run was started or continued. They replace the earlier value.
        """
        good = [row for row in rows if row.error is None]
        n_kept = sum(row.is_kept for row in good)
        n_bare = sum(not row.candidates for row in good)
        # The LLM reads one prompt without a passage, and one for each candidate passage.
        n_prompts = sum(1 + len(row.candidates) for row in good) if is_fresh else 0
        return replace(
            self,
            done=self.done + len(rows),
            kept=self.kept + n_kept,
            one_sided=self.one_sided + len(good) - n_kept - n_bare,
            bare=self.bare + n_bare,
            failed=self.failed + len(rows) - len(good),
            duplicates=self.duplicates + sum(row.duplicates for row in good),
            cut=self.cut + sum(row.cut for row in good),
            prompts=self.prompts + n_prompts,
            seconds=seconds,
        )


@with_options(PreferenceOptions)
def measure_preferences(
    runs: RunsLike,
    out: str | Path,
    *,
    model: str | Model | None = None,
    prompts: AnswerPrompts | None = None,
    on_progress: Callable[[PreferenceProgress], None] = lambda progress: None,
    options: PreferenceOptions,
) -> PreferenceProgress:
    """Measure which candidate passages help the LLM to answer labeled questions.

    A reranker can learn from the result. Interrupted runs continue.

    Args:
        runs: Label runs of one model.
        out: Preference folder.
        model: The LLM whose answers were labeled. Default: it is loaded by its name in the runs.
        prompts: Prompt wording.
        on_progress: Called after every batch.
        options: See `PreferenceOptions`; fields can be given as keywords.

    Returns:
        How many questions are usable, because some passages help and others do not, and how many are not, by reason.

    Raises:
        BadSetting: An option cannot be used, or the label runs come from another model.
        BadInput: There are no questions or no candidates.
    """
    is_remote = is_remote_runner(options.runner)
    run_folders = [RunFolder(path) for path in resolve_run_paths(runs)]
    questions = _collect_questions(run_folders, options)
    llm = _load_labeled_model(run_folders, model)
    # Other machines load the model by its name.
    model_name = require_name("model", model or run_folders[0].settings()["model"]) if is_remote else None
    spec = PreferenceJobSpec(model_name or "", prompts or AnswerPrompts(), options.replace(runner=None))
    retriever = load_retriever(options.index) if options.index else None
    labeler = spec.create_labeler(llm, retriever)
    runner = _create_runner(options.runner, spec, labeler)
    data = options.data or ", ".join(str(run.settings().get("data", run.path.name)) for run in run_folders)
    folder = PreferenceFolder(Path(out))
    with connect_early(runner, folder.path):
        return run_preferences(folder, questions, labeler, data=data, runner=runner, on_progress=on_progress)


def _create_runner(runner: Any, spec: PreferenceJobSpec, labeler: passage_effects.PreferenceLabeler) -> Runner:
    """Create the runner that the option `runner` names: 'local' (the default) or 'ray'. A runner object is used as it is."""
    if is_remote_runner(runner):
        return create_ray_runner(runner, spec, labeler.make_failed_rows, labeler.identity)
    if runner is None or isinstance(runner, str):
        return LOCAL_PREFERENCE_RUNNER
    return cast(Runner, runner)


def _collect_questions(folders: Sequence[RunFolder], options: PreferenceOptions) -> list[Question]:
    """Collect the labeled questions, each once, with their candidate passages.

    With `options.index`, the passages are searched later.
    """
    uses_own_passages = not (options.index or options.data)
    questions: dict[str, Question] = {}
    for folder in folders:
        for row in folder.rows():
            if row.error is None and (options.limit is None or len(questions) < options.limit):
                contexts = row.passages if uses_own_passages else ()
                questions.setdefault(row.id, replace(question_from_row(row), contexts=contexts))
    if not questions:
        paths = ", ".join(str(folder.path) for folder in folders)
        raise BadInput(f"there are no labeled questions in {paths}. Record answers with `knowgate label`.")
    return _add_contexts(questions, options.data) if options.data else list(questions.values())


def _add_contexts(questions: Mapping[str, Question], data: str) -> list[Question]:
    """Add the passages of a question set to the questions."""
    contexts = {question.id: question.contexts for question in load_questions(data)}
    missing = [name for name in questions if name not in contexts]
    if missing:
        raise BadInput(
            f"the question set data='{data}' lacks {len(missing)} of the {len(questions)} labeled questions, such as "
            f"'{missing[0]}'. Give the question set that was labeled, or set `index`."
        )
    return [replace(question, contexts=contexts[name]) for name, question in questions.items()]


def _load_labeled_model(folders: Sequence[RunFolder], model: str | Model | None) -> Model:
    """Load the model of the label runs, and check that all runs used it."""
    settings = [folder.settings() for folder in folders]
    llm = resolve_model(model or settings[0]["model"])
    for folder, run in zip(folders, settings, strict=True):
        if run.get("model_fingerprint") != llm.fingerprint:
            raise BadSetting(
                f"the recorded answers in '{folder.path}' come from {run.get('model')} ({run.get('model_fingerprint')}), not "
                f"from {llm.name} ({llm.fingerprint}). Label with {llm.name}, or set model={run.get('model')}."
            )
    return llm


# --- the run --------------------------------------------------------------------------------------


def run_preferences(
    folder: PreferenceFolder,
    questions: Sequence[Question],
    labeler: passage_effects.PreferenceLabeler,
    *,
    data: str,
    runner: Runner = LOCAL_PREFERENCE_RUNNER,
    on_progress: Callable[[PreferenceProgress], None] = lambda progress: None,
) -> PreferenceProgress:
    """Measure all questions without a row yet, and write every finished batch.

    Args:
        folder: Preference folder; may hold an interrupted run with the same settings.
        questions: Questions with unique ids.
        labeler: The labeler.
        data: Name of the data, recorded in the folder.
        runner: Runs the batches.
        on_progress: Called after every batch.

    Raises:
        BadInput: No question has both helpful and harmful passages, so nothing can be learned from the run.
    """
    with folder.exclusive():
        folder.start(describe_preference_run(labeler, questions, data), describe_environment())
        progress = PreferenceProgress(len(questions))
        done: set[str] = set()
        for row in folder.rows():  # of an interrupted run
            progress = progress.add([row], is_fresh=False)
            done.add(row.id)
        on_progress(progress)
        remaining = [question for question in questions if question.id not in done]
        start = time.perf_counter()
        try:
            for rows in runner.run(remaining, labeler.label):
                _check_candidates_found(rows, progress)
                folder.append(rows)
                progress = progress.add(rows, seconds=time.perf_counter() - start)
                on_progress(progress)
        finally:
            folder.update(totals=asdict(progress))
        _write_pairs(folder)
    _check_useful(progress, labeler)
    return progress


def _write_pairs(folder: PreferenceFolder) -> None:
    """Write the kept rows in the format of the CBDR paper's code."""
    with atomic_file(folder.path / PAIRS_FILE) as file:
        for row in folder.rows():
            if row.is_kept:
                record = json.dumps(to_cbdr_record(row), ensure_ascii=False)
                file.write(f"{record}\n".encode())


def describe_preference_run(
    labeler: passage_effects.PreferenceLabeler, questions: Sequence[Question], data: str
) -> dict[str, Any]:
    """Return the settings of a preference run.

    An interrupted run can be continued only with equal settings.
    """
    source, retriever = labeler.source, labeler.retriever
    settings: dict[str, Any] = {
        "data": data,
        "data_fingerprint": fingerprint_questions(questions),
        "questions": len(questions),
        "model": source.model.name,
        "model_fingerprint": source.model.fingerprint,
        "prompts_fingerprint": source.prompts.fingerprint,
        "retriever": retriever.name if retriever else "contexts",
        "retriever_fingerprint": retriever.fingerprint if retriever else None,
        "source": source.name,
        "candidates": labeler.candidates,
        "top": labeler.top,
        "seed": labeler.seed,
        "split": labeler.split,
    }
    if labeler.cut is not None:  # left out otherwise, so that folders of older versions can continue
        settings["cut_to"] = labeler.cut
    return settings | _describe_source(source)


def _describe_source(source: passage_effects.EffectSource) -> dict[str, Any]:
    """Return the settings of a source of effects: its probe or its grader, if it has either."""
    if isinstance(source, passage_effects.ConfidenceSource):
        artifact = source.gate.artifact
        return {"probe": {"name": artifact.path.name, "checksum": artifact.manifest["checksum"], **artifact.options}}
    return {"grader": source.grader.name} if isinstance(source, passage_effects.BenefitSource) else {}


def _check_candidates_found(rows: Sequence[Preference], progress: PreferenceProgress) -> None:
    """Raise BadInput if no question has candidate passages yet, probably from a wrong index.

    Args:
        rows: The rows of the latest batch.
        progress: The progress before this batch.
    """
    # Bare rows have no candidate passages. Failed rows may have had some.
    if progress.done > progress.bare or any(row.candidates or row.error for row in rows):
        return
    raise BadInput(
        f"no passage was found for any of the first {len(rows)} questions. Set `index` to documents about these questions, or "
        "`data` to questions with passages."
    )


def _check_useful(progress: PreferenceProgress, labeler: passage_effects.PreferenceLabeler) -> None:
    """Raise BadInput if a finished run has nothing for a reranker to learn."""
    if progress.done == progress.total and not progress.kept:
        raise BadInput(
            f"no question has both helpful and harmful passages, which a reranker learns from. Of {progress.total} questions, "
            f"{progress.one_sided} have only one kind, {progress.bare} have none, and {progress.failed} failed. Use more "
            f"questions, more `candidates`, or another `source` than '{labeler.source.name}'."
        )


# --- on other machines ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PreferenceJobSpec:
    """Describes a measurement of how passages help an LLM, by names only.

    Other machines receive the description, and load the LLM, the index and the probe by their names.

    Attributes:
        model: Name of the LLM.
        prompts: Prompts with which the LLM answers.
        options: Further options, with the names of the index and of the probe.
    """

    model: str
    prompts: AnswerPrompts
    options: PreferenceOptions

    @property
    def index(self) -> str | None:
        """The index that candidates come from."""
        return self.options.index

    def create(self, retriever: Retriever | None) -> passage_effects.PreferenceLabeler:
        """Load the model and create the labeler."""
        return self.create_labeler(load_model(self.model), retriever)

    def create_labeler(self, llm: Model, retriever: Retriever | None) -> passage_effects.PreferenceLabeler:
        """Create the labeler for a loaded model."""
        options = self.options
        source_name = options.source or ("confidence" if options.gate else DEFAULT_SOURCE)
        source = load_effect_source(source_name, llm, options.gate, self.prompts)
        return passage_effects.PreferenceLabeler(
            source, retriever, options.candidates, options.top, options.seed, options.split, options.cut
        )


def load_effect_source(name: str, llm: Model, gate: str | None, prompts: AnswerPrompts) -> passage_effects.EffectSource:
    """Create an effect source by name; 'confidence' loads the probe `gate`."""
    if name == "benefit":
        return passage_effects.BenefitSource(llm, load_grader("contains"), prompts)
    if name == "likelihood":
        return passage_effects.LikelihoodSource(llm, prompts)
    probe = load_gate(gate) if gate else None
    if not isinstance(probe, ProbeGate):
        problem = f"gate='{gate}' is not one" if gate else "`gate` is missing"
        raise BadSetting(
            f"source='confidence' needs a probe (classifier of hidden states), but {problem}. {passage_effects.FIT_PROBE_HINT}"
        )
    return passage_effects.ConfidenceSource(llm, probe.bind(llm, prompts.fingerprint), prompts)
