"""`knowgate prefer`: measure which retrieved passages help an LLM to answer, and which mislead it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import inform
from knowgate.cli.options import LabelsOption, LangOption, PromptsOption, path_option
from knowgate.cli.progress import show_progress
from knowgate.data.preferences import PreferenceFolder
from knowgate.models.prompts.answers import load_answer_prompts
from knowgate.training.preference_run import PreferenceOptions, PreferenceProgress, measure_preferences


def prefer(
    labels: LabelsOption,
    out: Annotated[Path, path_option("PREF", "Folder of the measurements. An interrupted run is continued.")],
    options: PreferenceOptions,
    model: Annotated[
        str | None, typer.Option(help="LLM that answers with each passage. Default: that of the label run.")
    ] = None,
    lang: LangOption = None,
    prompts: PromptsOption = None,
) -> None:
    """Measure how each candidate passage changes the LLM's confidence in its answer. `fit reranker` learns from this.

    Run the same command again to continue an interrupted run.

    Example: knowgate prefer --labels run --index my-index --out pref
    """
    wording = load_answer_prompts(prompts, lang)
    try:
        with show_progress("measuring", "questions") as show:
            progress = measure_preferences(
                labels,
                out,
                model=model,
                prompts=wording,
                options=options,
                on_progress=lambda state: show(state.done, state.total, _format_speed(state)),
            )
    except KeyboardInterrupt:
        count = len(PreferenceFolder(out).done())
        inform(f"{count} questions are saved in {out}. Run the same command to continue.")
        raise
    _print_summary(progress, out)


def _format_speed(progress: PreferenceProgress) -> str:
    return f"{progress.prompts / progress.seconds:.1f} prompts/s" if progress.seconds else ""


def _print_summary(progress: PreferenceProgress, out: Path) -> None:
    """Print how many questions a reranker can be trained on, why the others are left out, and the next command.

    A reranker learns from questions that have both passages that help the LLM and passages that do not.
    """
    inform(f"{progress.kept} of {progress.done} questions have passages that help and passages that do not.")
    inform(
        f"Left out: {progress.one_sided} whose passages are all of one kind, {progress.bare} without passages, "
        f"{progress.failed} failed (see 'error' in the rows)."
    )
    inform(f"Duplicate passages dropped: {progress.duplicates}; shortened to fit the context window: {progress.cut}.")
    inform(f"Train a reranker on them: knowgate fit reranker --pref {out} --out DIR")
