"""`fit_policy`: from label runs to one folder with gate, arbiter, threshold and guarantee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from knowgate.core.files import check_replaceable
from knowgate.core.options import with_options
from knowgate.data.runs.folder import RunsLike, resolve_run_paths
from knowgate.errors import BadSetting, WeightsError, require_extra
from knowgate.gates import load_fitted_gate
from knowgate.gates.artifacts.gate_folder import GATE_KIND, GATE_MANIFEST
from knowgate.gates.baselines import CONSTANT_NEED
from knowgate.gates.calibration.threshold_choice import GateOutcomes, NetLoss, list_candidate_thresholds
from knowgate.gates.fitted_gate import FittedGate
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training.classifiers import auroc_or_half
from knowgate.training.fit_function import FitProgressCallback, ignore_progress
from knowgate.training.judges.checkpoint import checkpoint_folder, delete_checkpoint
from knowgate.training.policy.candidates import CandidateFitter, choose_base, detect_gpu, score_calibrated
from knowgate.training.policy.choice import PolicyChoice, RejectedPolicy, apply_policy, choose_policy
from knowgate.training.policy.evidence import Evidence, PolicyOptions, load_evidence
from knowgate.training.policy.folder import PolicyParts, format_proof, write_policy
from knowgate.training.policy.outcomes import ALWAYS, NEVER, PolicyResult, combine_results, format_change
from knowgate.training.topics import TopicResult, describe_extremes, measure_topics

UNCALIBRATED_THRESHOLD = 0.5
NO_TOPICS = "none"
NO_JUDGE_NOTE = "No judge is fine-tuned here unless you name one: base='small' takes minutes per 1,000 questions."


@dataclass(frozen=True, repr=False)
class FittedPolicy:
    """A policy that was chosen, tested and written to a folder.

    Attributes:
        path: The folder.
        choice: What was tried and chosen; None if the label runs have no open-book answers.
        held_out: Result of the policy on rows that only test it; None without open-book answers (with passages).
        summary: What was chosen and why, one sentence per line.
    """

    path: Path
    choice: PolicyChoice | None
    held_out: PolicyResult | None
    summary: tuple[str, ...]

    @cached_property
    def gate(self) -> FittedGate:
        """The gate of the policy. An `AdaptiveRAG` with this gate also uses the arbiter of the policy."""
        return load_fitted_gate(str(self.path))

    def __repr__(self) -> str:
        return f"<FittedPolicy {self.path}: {' '.join(self.summary)}>"


@with_options(PolicyOptions)
def fit_policy(
    runs: RunsLike,
    *,
    out: str | Path,
    options: PolicyOptions,
    watch: FitProgressCallback | None = None,
    command: str = "",
) -> FittedPolicy:
    """Choose a policy by its results on recorded answers, test it, and write it to a folder.

    A policy is a gate (it decides whether to retrieve), its threshold, and perhaps an arbiter (it picks the answer with
    or without passages). Three quarters of the questions serve to choose it, by cross-validation. The last quarter tests it.

    Args:
        runs: One or more label runs (folders of graded answers) of one LLM.
        out: Folder to write the policy to. Its path can be given instead of the name of a gate.
        options: Options as one object. Each option can also be given as a keyword.
        watch: Callback that receives the progress.
        command: The command line that the model card shows.

    Returns:
        The policy.

    Raises:
        BadSetting: There are no label runs, or an option has a value that is not allowed.
        BadInput: The label runs have too few questions.
        MissingExtra: The packages for training are not installed.

    Example:
        >>> policy = fit_policy("runs/train", out="my-policy")  # doctest: +SKIP
    """
    folder = Path(out)
    if not runs:
        raise BadSetting("fitting a policy needs recorded answers. Set `labels` to folders of `knowgate label`.")
    check_replaceable(folder, GATE_MANIFEST, GATE_KIND)  # Fail before the training, not after it.
    with require_extra("fitting a policy", "train"):
        evidence = load_evidence(resolve_run_paths(runs), options.seed)
        base = choose_base(evidence, options, detect_gpu())
        fitter = CandidateFitter(evidence, base, checkpoint_folder(folder), watch or ignore_progress)
        lacks_judge = not base and options.base is None  # the user did not say base='none'
        fitter.report(f"{evidence.describe()} {NO_JUDGE_NOTE}" if lacks_judge else evidence.describe())
        search = PolicySearch(fitter, options, command)
        policy = search.fit_open_book(folder) if evidence.has_both_answers else search.fit_closed_book(folder)
    delete_checkpoint(folder)
    return policy


@dataclass(frozen=True)
class PolicySearch:
    """Chooses, fits, tests and writes a policy.

    Attributes:
        fitter: Fits gates and arbiters.
        options: What the policy may lose, and what things cost.
        command: The command line that the model card shows.
    """

    fitter: CandidateFitter
    options: PolicyOptions
    command: str = ""

    @property
    def evidence(self) -> Evidence:
        """The graded questions."""
        return self.fitter.evidence

    # --- both answers -----------------------------------------------------------------------------

    def fit_open_book(self, out: Path) -> FittedPolicy:
        """Choose, fit, test and write a policy. All rows have answers with and without passages."""
        if shortage := self._describe_shortage():
            self.fitter.report(shortage)
        rows, table = self.evidence.fit_rows, self.evidence.table
        choice = choose_policy(
            self.fitter.gates,
            table.closed_book_right[rows],
            table.retrieved_right[rows],
            self.fitter.arbiters,
            folds=self.evidence.folds[rows],
            options=self.options,
        )
        return self._fit_choice(choice, out)

    def _fit_choice(self, choice: PolicyChoice, out: Path) -> FittedPolicy:
        """Fit, test and write a chosen policy.

        If the policy loses too many right answers in the test, its replacement is fitted, tested and written instead.
        """
        parts, held_out = self._fit_and_test(choice)
        # The safety check counts all questions: the held-out ones, which were tested now, and the questions to choose on,
        # which were tested by cross-validation when the policy was chosen.
        total = combine_results([choice.estimate, held_out])
        if choice.chosen.name != ALWAYS and not total.is_safe(self.options):
            return self._fit_choice(self._replace_failed(choice, total), out)
        topics = self._measure_topics(self._list_retrieved(choice.chosen, parts))
        summary = tuple(self._summarize(choice, held_out, total, topics))
        write_policy(replace(parts, summary=summary, topics=topics), self.fitter.work, out, self.command)
        return FittedPolicy(out, choice, held_out, summary)

    def _fit_and_test(self, choice: PolicyChoice) -> tuple[PolicyParts, PolicyResult]:
        """Fit the chosen gate and arbiter, and test them on the held-out questions.

        Losses are counted against the reference policy. It always retrieves and may have an arbiter, which is fitted, too.

        Returns:
            The fitted parts, and their result on the held-out questions.
        """
        rows = self.evidence.held_out
        result, examples = self.fitter.fit_gate(choice.chosen.gate)
        needs = score_calibrated(result, examples, rows)
        policy = replace(choice.chosen, threshold=_transfer_threshold(choice.chosen, needs))
        # The folder of an arbiter is written anew by each fit, so the arbiter of the policy is fitted last.
        reference_prefers_closed_book, _ = self.fitter.fit_arbiter(choice.reference.arbiter, self.command)
        prefers_closed_book, arbiter_folder = self.fitter.fit_arbiter(policy.arbiter, self.command)
        closed_book_right = self.evidence.table.closed_book_right[rows]
        open_book_right = self.evidence.table.retrieved_right[rows]
        arbitrated_right = None
        if prefers_closed_book is not None:
            arbitrated_right = np.where(prefers_closed_book, closed_book_right, open_book_right)
        outcomes = GateOutcomes(needs, closed_book_right, open_book_right, arbitrated_right)
        held_out = apply_policy(
            policy,
            needs,
            closed_book_right,
            open_book_right,
            prefers_closed_book,
            reads_draft=policy.is_constant or self.fitter.recipes[policy.gate].reads_draft,
            reference_prefers_closed_book=reference_prefers_closed_book,
            options=self.options,
        )
        parts = PolicyParts(
            self.evidence, result, examples, policy.threshold, choice, outcomes, arbiter_folder, self.options.confidence
        )
        return parts, held_out

    def _replace_failed(self, choice: PolicyChoice, total: PolicyResult) -> PolicyChoice:
        """Return what to fit and test instead of a policy that failed the test.

        The same policy gets a second chance if the reference had an arbiter: its losses are then counted only against always
        retrieving without an arbiter. Otherwise a constant policy (the same decision for every question) is chosen.

        Args:
            choice: The choice with the policy that failed.
            total: Cross-validated result of this policy on all questions.
        """
        if choice.reference.arbiter and choice.constant.name == ALWAYS:
            estimate = replace(choice.estimate, reference_loss=choice.estimate.loss)
            return replace(choice, reference=choice.always, estimate=estimate)
        name = choice.chosen.name
        failure = total.describe_violation(self.options, choice.reference.name)
        reason = (
            f"{name} was best on the questions to choose on, but failed when the test questions were added: {failure}"
        )
        rejected = choice.rejected or RejectedPolicy(name, total, failure)
        required = total.reference_loss.count_required_rows(self.options)
        if required is not None:  # the held-out questions are not questions to choose on
            required = math.ceil(required * len(self.evidence.fit_rows) / total.loss.n)
        constant = choice.always if choice.chosen.is_constant else choice.constant
        choice = replace(choice, chosen=constant, estimate=constant, reason=reason)
        return replace(choice, required_rows=required, rejected=rejected)

    def _list_retrieved(self, chosen: PolicyResult, parts: PolicyParts) -> BoolArray:
        """Return for each question whether the policy retrieves.

        Args:
            chosen: The policy, as chosen by cross-validation, which also gives its decisions about all rows but the held-out
                ones.
            parts: The fitted policy, which gives the decisions about the held-out rows.
        """
        assert parts.outcomes is not None
        needs_by_gate = {gate.name: gate.needs for gate in self.fitter.gates}
        # Always and never retrieving are not among the gates that were tried; they have a constant need.
        needs = needs_by_gate.get(chosen.gate, CONSTANT_NEED)
        retrieved = np.empty(len(self.evidence.table), dtype=bool)
        retrieved[self.evidence.fit_rows] = needs > chosen.threshold
        retrieved[self.evidence.held_out] = parts.outcomes.needs > parts.threshold
        return retrieved

    def _measure_topics(self, retrieved: BoolArray | None = None) -> list[TopicResult]:
        """Measure by topic what the LLM knows and how often the policy retrieves.

        Args:
            retrieved: For which questions the policy retrieves; None if there is no policy to measure.

        Returns:
            The topics; none if the option `topics` is 'none' or the embedding model is missing.
        """
        if self.options.topics == NO_TOPICS:
            return []
        table, embedder = self.evidence.table, self.evidence.embedder
        try:
            return measure_topics(table, self.options.topics, retrieve=retrieved, embedder=embedder)
        except WeightsError as error:
            self.fitter.report(f"topics were left out: {error}")
            return []

    def _summarize(
        self, choice: PolicyChoice, held_out: PolicyResult, total: PolicyResult, topics: Sequence[TopicResult]
    ) -> list[str]:
        """Summarize the choice, its reason, its results on new questions, and the topics.

        Args:
            choice: The choice.
            held_out: Result of the policy on the held-out rows.
            total: Cross-validated result on all questions, held-out rows included.
            topics: What the LLM knows by topic; may be empty.
        """
        lines = [f"Chosen: {choice.chosen.name}, because {choice.reason}."]
        if warning := total.describe_extra_cost(self.options):
            lines.append(warning)
        if choice.chosen.name == NEVER:
            lines.append("Retrieval hardly pays here: the LLM answers about as many questions right without it.")
        if choice.chosen.name == ALWAYS:
            lines.append(self._explain_always(choice))
        else:
            lines += self._describe_results(choice, held_out, total)
        return [*lines, describe_extremes(topics)] if topics else lines

    def _describe_results(self, choice: PolicyChoice, held_out: PolicyResult, total: PolicyResult) -> list[str]:
        """Describe the results on all questions and on the test questions, with the guarantee."""
        return [
            f"On all {total.loss.n} questions, each tested with a policy that did not learn from it: "
            f"{choice.describe_losses(total, self.options)}",
            f"On the {held_out.loss.n} test questions alone: {held_out.searches:.1%} searches, {held_out.right:.1%} right, "
            f"{format_change(held_out.loss.mean)} than {ALWAYS} retrieving, {held_out.llm_calls:.2f} LLM calls per question.",
            format_proof(held_out.loss, self.options.confidence),
        ]

    def _explain_always(self, choice: PolicyChoice) -> str:
        """Explain why always retrieving was chosen, and what could change this."""
        if shortage := self._describe_shortage(choice.required_rows):
            return shortage
        if choice.rejected is None:
            return f"No policy that was tried is both safe and clearly worth more than {ALWAYS} on these questions."
        return (
            "No policy passed all checks. The row 'rejected' shows the results of the best-looking policy on questions that it "
            "was not chosen on."
        )

    def _describe_shortage(self, required: int | None = None) -> str:
        """Describe how many graded questions are needed to prove a policy safe.

        Args:
            required: How many questions to choose on a proof needs, if answers are lost and gained as often as here.
                Default: the number for a policy that neither loses nor gains an answer.

        Returns:
            The advice; '' if there are enough questions.
        """
        n = len(self.evidence.table)
        n_fit = len(self.evidence.fit_rows)
        case = "if it loses and gains answers as often as here"
        if not required:
            case = "even if it loses no answer"
            required = NetLoss(0, 0, 1).count_required_rows(self.options) or 0
        if required <= n_fit:
            return ""
        return (
            f"You gave {n} graded questions, {n_fit} of them to choose on. At least {required} questions to choose on, about "
            f"{math.ceil(required * n / n_fit)} in all, are needed to prove that a policy that saves searches is safe, "
            f"{case}. Fewer are enough only if a policy gives more right answers than {ALWAYS} retrieving."
        )

    # --- closed-book answers only -----------------------------------------------------------------

    def fit_closed_book(self, out: Path) -> FittedPolicy:
        """Fit a policy on label runs with only closed-book answers (without passages).

        The policy uses the gate with the best AUROC in a cross-validation.
        """
        if not self.fitter.gates:
            raise BadSetting(
                "no gate can be fitted, because nearly all recorded answers are right or nearly all are wrong. Label other "
                "questions with `knowgate label`."
            )
        needed = self.evidence.list_needed("known")[self.evidence.fit_rows]
        aurocs = {gate.name: auroc_or_half(needed, gate.needs) for gate in self.fitter.gates}
        best = max(aurocs, key=lambda name: aurocs[name])
        result, examples = self.fitter.fit_gate(best)
        topics = self._measure_topics()
        parts = PolicyParts(self.evidence, result, examples, UNCALIBRATED_THRESHOLD, topics=topics)
        write_policy(parts, self.fitter.work, out, self.command)
        figures = ", ".join(f"{name} {auroc:.3f}" for name, auroc in aurocs.items())
        summary = [
            f"Chosen: {best}, which ranks best what the LLM knows (AUROC out of fold: {figures}).",
            "Its threshold is not calibrated, because the label runs have no answers with passages.",
        ]
        if topics:
            summary.append(describe_extremes(topics))
        return FittedPolicy(out, None, None, tuple(summary))


def _transfer_threshold(chosen: PolicyResult, needs: FloatArray) -> float:
    """Return a threshold with which the fitted gate retrieves as often as the chosen policy did in the cross-validation.

    The fitted gate needs its own threshold, because the scale of its needs differs a little from the cross-validation.

    Args:
        chosen: The chosen policy.
        needs: Needs that the fitted gate predicts for the held-out rows. Their grades are not used.
    """
    if chosen.gate in (ALWAYS, NEVER):
        return chosen.threshold
    thresholds = list_candidate_thresholds(needs)
    retrieval_rates = 1 - np.searchsorted(np.sort(needs), thresholds, side="right") / len(needs)
    nearest = np.argmin(np.abs(retrieval_rates - chosen.searches))
    return float(thresholds[nearest])
