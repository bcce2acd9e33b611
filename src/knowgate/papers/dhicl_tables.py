"""The tables of DH-ICL (Lv et al.: Tables 1, 4, 5, 6 and Figure 6) on label runs.

The LLM decides once with each variant of the DH-ICL gate. The decisions are stored in the run, so that the tables can
be built again without the LLM. Variants that differ only in the sign of calibration share one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from knowgate.core import split_batches
from knowgate.core.display import MISSING_VALUE, TextTable, format_percent
from knowgate.data.history import open_history
from knowgate.data.history.entries import KnowledgeLabel
from knowgate.data.runs.records import RecordedNeeds, TableScores, check_same_llm, write_needs
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.dhicl import DhiclGate
from knowgate.gates.history_scope import open_history_store
from knowgate.gates.offline_scoring import score_gate
from knowgate.gates.prompt import PromptGate
from knowgate.gates.scoring import bind_gate, read_questions, score_questions
from knowgate.labels.history_entries import scope_from_settings
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.papers.sweeps import format_auroc, measure_decisions
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.types import Gate, Model, Question

EXAMPLE_COUNTS = (5, 10, 20, 30, 40, 50, 60, 70)  # Figure 6
LABEL_WORD_PAIRS = ("true/false", "false/true", "yes/no", "bar/foo", "foo/bar", "1/2", "2/1", "ile/ore", "ore/ile")
DECISION_BATCH = 32  # questions per forward pass
CUT_GRID = 101  # candidate cuts, at the quantiles of the needs
MIN_CLASS_SIZE = 5  # known and unknown logged questions that a cut needs at least
DIRECT_GATE = "prompt"  # gate that asks the LLM directly, without history


@dataclass(frozen=True)
class DhiclVariants:
    """The variants of the DH-ICL gate (demonstrations from the history) in the tables of the paper.

    The gate shows the LLM similar earlier questions and asks whether it knows the new one.

    Attributes:
        history: File of the log of earlier questions.
        k: Number of logged questions shown as examples. One table varies it.
        counts: Numbers of examples that this table compares.
        words: Pairs of words for known and unknown with which the LLM answers, such as 'true/false'. One table compares
            them.
        embedder: Embedding model that finds similar logged questions. By default the one stored with the log.
    """

    history: str
    k: int = 20
    counts: Sequence[int] = EXAMPLE_COUNTS
    words: Sequence[str] = LABEL_WORD_PAIRS
    embedder: str | None = None

    @property
    def standard(self) -> DhiclGate:
        """The gate as the paper describes it."""
        return DhiclGate(self.history, k=self.k, embedder=self.embedder)

    def list_tables(self) -> dict[str, dict[str, Gate]]:
        """List the gates that each table of the paper compares: for each title of a table, the gates by name.

        Table 1 of the paper is left out, because it compares no variants of the DH-ICL gate.
        """
        gate = self.standard
        ablations = [
            gate,
            replace(gate, sign="none"),  # without calibration
            replace(gate, sign="code"),  # calibrated as in the published code, which differs from the paper
            replace(gate, time_sensitive=False),  # without examples whose answer changes over time
        ]
        if self.k > 1:
            ablations.append(replace(gate, balanced=True))  # as many known as unknown examples
        return {
            "Ablations (Table 4)": {**self._name_gates(ablations), DIRECT_GATE: PromptGate()},
            "Cold start (Table 5)": self._name_gates([gate, replace(gate, cold=True)]),
            "Number of examples (Figure 6)": self._name_gates(replace(gate, k=count) for count in self.counts),
            "Label words (Table 6)": self._name_gates(replace(gate, words=pair) for pair in self.words),
        }

    def list_gates(self) -> dict[str, Gate]:
        """Return the gates of all tables by name, each once."""
        return {name: gate for gates in self.list_tables().values() for name, gate in gates.items()}

    def make_name(self, gate: DhiclGate) -> str:
        """Return the name of a variant with its changed options. Example: 'dhicl:k=5'."""
        default = DhiclGate(self.history, embedder=self.embedder)
        same_in_all_variants = ("history", "embedder", "tenant", "scope")
        options = []
        for option in fields(gate):
            value = getattr(gate, option.name)
            if option.name not in same_in_all_variants and value != getattr(default, option.name):
                text = str(value).lower() if isinstance(value, bool) else value
                options.append(f"{option.name}={text}")
        return f"dhicl:{','.join(options)}" if options else "dhicl"

    def _name_gates(self, gates: Iterable[DhiclGate]) -> dict[str, Gate]:
        """Return variants of the gate by name."""
        return {self.make_name(gate): gate for gate in gates}


def build_dhicl_tables(
    runs: Sequence[Path],
    variants: DhiclVariants,
    *,
    model: Model | None = None,
    other_gates: Sequence[str] = (),
    cut_questions: int = 0,
    notify: Callable[[str], None] = lambda message: None,
) -> list[TextTable]:
    """Build the tables of the DH-ICL paper from the decisions stored in label runs.

    With a model, missing decisions are made first.

    Args:
        runs: Folders of label runs.
        variants: Variants of the gate.
        model: LLM that decides now; None to use stored decisions only.
        other_gates: Gates to compare with in Table 1.
        cut_questions: If above 0, learn a cut (the need above which the gate retrieves) from this many logged questions.
            A further table compares the learned cut with the cut of the paper, 0.5. Needs a model.
        notify: Called with a message before each variant decides.

    Raises:
        BadInput: A run has no stored decisions of the standard gate.
        BadSetting: A run was made with another LLM or other prompts, or a cut is to be learned without a model.
    """
    if cut_questions and model is None:
        raise BadSetting(
            "`learn_cut` needs an LLM that judges logged questions. Set `model`, or leave `learn_cut` at 0."
        )
    tables = {}  # name of the run -> its questions and answers
    for run in runs:
        if model is not None:
            record_decisions(run, variants, model, notify)
        tables[run.name] = _load_recorded_table(run, variants)
    scores = {name: _score_gates(table, other_gates, variants) for name, table in tables.items()}
    standard = variants.make_name(variants.standard)
    main_gates = [*dict.fromkeys(other_gates), standard]
    result = [_build_table("Accuracy (retrieval rate) (Table 1)", tables, scores, main_gates)]
    for title, gates in variants.list_tables().items():
        result.append(_build_table(title, tables, scores, list(gates)))
    if model is not None and cut_questions:
        notify(f"learning a cut from {cut_questions} logged questions")
        learned = learn_cut(variants.standard, model, cut_questions)
        result.append(_build_cut_table(learned, standard, tables, scores))
    return result


def _score_gates(table: LabelTable, other_gates: Sequence[str], variants: DhiclVariants) -> dict[str, TableScores]:
    """Score a label run with other gates, and with the variants whose decisions it stores."""
    recorded = [name for name in variants.list_gates() if name in table.recorded_needs]
    return {gate: score_gate(table, gate) for gate in [*other_gates, *recorded]}


def _build_cut_table(
    learned: LearnedCut,
    gate: str,
    tables: Mapping[str, LabelTable],
    scores: Mapping[str, Mapping[str, TableScores]],
) -> TextTable:
    """Build a table of a gate at two cuts (thresholds of the need): 0.5 and the learned cut.

    Args:
        learned: The learned cut.
        gate: Name of the gate.
        tables: Label runs by name.
        scores: Scores of gates, by the name of the run and of the gate.
    """
    cuts = {"0.5 (paper)": 0.5, f"{learned.cut:.3f} (learned)": learned.cut}
    scores_by_cut = {}  # name of the run -> label of the cut -> scores of the gate with this cut
    for run in tables:
        if gate in scores[run]:
            scores_by_cut[run] = {label: replace(scores[run][gate], threshold=cut) for label, cut in cuts.items()}
    title = (
        f"Cut learned by leave-one-out from {learned.questions} logged questions, {format_percent(learned.known_share)} "
        f"known; balanced accuracy there {learned.balanced_accuracy:.3f}, at 0.5 {learned.at_half:.3f}"
    )
    return _build_table(title, {run: tables[run] for run in scores_by_cut}, scores_by_cut, list(cuts))


def _load_recorded_table(run: Path, variants: DhiclVariants) -> LabelTable:
    """Load a label run with stored decisions of the standard gate."""
    table = load_label_table([run])
    name = variants.make_name(variants.standard)
    if name not in table.recorded_needs:
        advice = f"To let the LLM decide now, set model={table.settings['model']!r}."
        raise BadInput(f"the recorded answers in '{run}' have no decisions of gate '{name}'. {advice}")
    return table


def record_decisions(run: Path, variants: DhiclVariants, model: Model, notify: Callable[[str], None]) -> None:
    """Let the variants of the gate decide on a label run, and store the decisions.

    Variants with stored decisions are skipped.

    Args:
        run: Folder of the label run.
        variants: Variants of the DH-ICL gate.
        model: The LLM that decides.
        notify: Called with a message before a variant decides.
    """
    table, prompts = load_label_table([run]), AnswerPrompts()
    check_same_llm(f"the label run '{run}'", table.settings, model, prompts.fingerprint)
    n_entries = open_history(variants.history, variants.embedder).count(scope_from_settings(table.settings))
    # Identifies the state of the log. Stored decisions are reused only if they were made with the same state.
    log_state = f"log of {n_entries} questions"
    if variants.embedder:
        log_state += f", {variants.embedder}"
    stored = {name for name, needs in table.recorded_needs.items() if needs.about == log_state}
    for reader, group in _group_by_pass(variants).items():  # the reader builds the prompts of its group
        if set(group) <= stored:
            continue
        names = ", ".join(group)
        notify(f"{run.name}: {names}")
        try:
            needs = _decide(table.questions, bind_gate(reader, model, prompts), group, model, prompts)
        except BadSetting as error:  # for example two label words that start with the same token
            notify(f"skipped {names}: {error}")
            continue
        write_needs(run, [RecordedNeeds(name, gate.threshold, needs[name], log_state) for name, gate in group.items()])


def _group_by_pass(variants: DhiclVariants) -> dict[Gate, dict[str, Gate]]:
    """Group the variants with the same prompt, to share one LLM pass.

    Such variants differ only in their calibration (`sign`).

    Returns:
        The variants of each group by name. The key of a group is the variant without calibration, which builds the prompt.
    """
    groups: dict[Gate, dict[str, Gate]] = {}
    for name, gate in variants.list_gates().items():
        reader = replace(gate, sign="none") if isinstance(gate, DhiclGate) else gate
        groups.setdefault(reader, {})[name] = gate
    return groups


def _decide(
    questions: Sequence[Question], reader: Gate, variants: Mapping[str, Gate], model: Model, prompts: AnswerPrompts
) -> dict[str, dict[str, float]]:
    """Let the LLM read the questions once, and score them with each variant.

    Args:
        questions: The questions.
        reader: Gate that builds the prompts which the LLM reads.
        variants: Variants of this gate by name. They have the same prompts, but calibrate the output differently.
        model: The LLM.
        prompts: Prompts that the label run was made with.

    Returns:
        The need for retrieval of each question, by the name of the variant and the id of the question.
    """
    needs: dict[str, dict[str, float]] = {name: {} for name in variants}
    for batch in split_batches(questions, DECISION_BATCH):
        readings = read_questions(model, [reader], batch, prompts)
        for name, gate in variants.items():
            scores = score_questions(gate, batch, readings)
            needs[name] |= {question.id: need for question, need in zip(batch, scores, strict=True)}
    return needs


def _build_table(
    title: str, tables: Mapping[str, LabelTable], scores: Mapping[str, Mapping[str, TableScores]], names: Sequence[str]
) -> TextTable:
    """Build a table that compares gates (rows) on label runs (columns).

    Args:
        title: Title of the table.
        tables: Label runs by name.
        scores: Scores of gates, by the name of the run and of the gate. A gate without scores on a run has dashes there.
        names: Names of the gates to show.
    """
    columns = ["gate"]
    for run in tables:
        columns += [run, "random", "AUROC"]
    rows = [_make_constant_row("never", 0.0, tables), _make_constant_row("always", 1.0, tables)]
    for name in names:
        cells = [name]
        for run, table in tables.items():
            cells += _make_cells(table, scores[run].get(name))
        rows.append(tuple(cells))
    return TextTable(title, tuple(columns), tuple(rows))


def _make_constant_row(name: str, need: float, tables: Mapping[str, LabelTable]) -> tuple[str, ...]:
    """Make the row of a gate with the same need for all questions, at a threshold of 0.5."""
    cells = [name]
    for table in tables.values():
        scores = TableScores(name, threshold=0.5, needs=np.full(len(table.rows), need))
        accuracy, random_accuracy, _ = _make_cells(table, scores)
        cells += (accuracy, random_accuracy, MISSING_VALUE)  # equal needs do not rank questions: there is no AUROC
    return tuple(cells)


def _make_cells(table: LabelTable, scores: TableScores | None) -> tuple[str, str, str]:
    """Format the three cells of a gate's results on a label run.

    Args:
        table: The label run.
        scores: Scores of the gate on it; None if there are none.

    Returns:
        The accuracy with the retrieval rate in parentheses, the accuracy of retrieving for as many questions at random,
        and the AUROC. Three dashes without scores.
    """
    if scores is None:
        return (MISSING_VALUE, MISSING_VALUE, MISSING_VALUE)
    cells = measure_decisions(table, scores.needs > scores.threshold)
    return (f"{cells['accuracy']} ({cells['retrieval']})", cells["random"], format_auroc(table, scores))


# --- a cut learned from the log ---------------------------------------------------------------------


@dataclass(frozen=True)
class LearnedCut:
    """A cut (retrieve above this need) learned from a log of questions.

    Attributes:
        cut: Retrieve if the need is above this value.
        questions: Number of logged questions it was learned from.
        known_share: Share of them that the LLM knows.
        balanced_accuracy: Mean share of right verdicts over known and unknown questions at the cut.
        at_half: The balanced accuracy at the paper's cut of 0.5.
    """

    cut: float
    questions: int
    known_share: float
    balanced_accuracy: float
    at_half: float


def learn_cut(gate: DhiclGate, model: Model, questions: int = 200) -> LearnedCut:
    """Learn the best cut (retrieve above this need) of a DH-ICL gate from its log.

    Args:
        gate: The gate with its history log.
        model: LLM that decides. It makes one pass per question.
        questions: Number of logged questions to draw. Time-sensitive questions are left out.

    Raises:
        BadSetting: The sample has too few known or too few unknown questions.
    """
    prompts = AnswerPrompts()
    bound = bind_gate(gate, model, prompts)
    if not isinstance(bound, DhiclGate) or bound.scope is None:
        raise BadSetting("`learn_cut` needs the gate 'dhicl' with a log of questions. Example: dhicl:history.db")
    store = open_history_store(gate.history, gate.embedder)
    entries = store.sample(questions, bound.scope, exclude=(KnowledgeLabel.TIME_SENSITIVE,))
    known = np.array([entry.label == KnowledgeLabel.KNOWN for entry in entries], dtype=bool)
    _check_class_sizes(known)
    needs: list[float] = []
    for batch in split_batches([Question(entry.question) for entry in entries], DECISION_BATCH):
        readings = read_questions(model, [bound], batch, prompts)
        needs += score_questions(bound, batch, readings)
    return summarize_cut(np.array(needs, dtype=float), known)


def _check_class_sizes(known: BoolArray) -> None:
    """Raise BadSetting if too few logged questions are known, or too few are unknown."""
    if min(known.sum(), (~known).sum()) < MIN_CLASS_SIZE:
        counts = f"{known.sum()} of the {len(known)} logged questions are known"
        raise BadSetting(
            f"{counts}. A threshold needs {MIN_CLASS_SIZE} known and {MIN_CLASS_SIZE} unknown questions. Log more questions."
        )


def summarize_cut(needs: FloatArray, known: BoolArray) -> LearnedCut:
    """Find the best cut (retrieve above this need), and compare it with 0.5.

    Args:
        needs: Need for retrieval of each question, from 0 (the LLM knows) to 1 (retrieve).
        known: Whether the LLM knows the answer of each question.
    """
    cut = find_best_cut(needs, known)
    accuracy = compute_balanced_accuracy(needs > cut, known)
    accuracy_at_half = compute_balanced_accuracy(needs > 0.5, known)
    return LearnedCut(cut, len(needs), float(known.mean()), accuracy, accuracy_at_half)


def find_best_cut(needs: FloatArray, known: BoolArray) -> float:
    """Return the cut (retrieve above this need) with the best balanced accuracy."""
    cuts = np.unique(np.quantile(needs, np.linspace(0, 1, CUT_GRID)))
    return float(max(cuts, key=lambda cut: compute_balanced_accuracy(needs > cut, known)))


def compute_balanced_accuracy(retrieve: BoolArray, known: BoolArray) -> float:
    """Return the mean of the accuracies on unknown and on known questions."""
    accuracy_on_unknown = retrieve[~known].mean()
    accuracy_on_known = (~retrieve[known]).mean()
    return float((accuracy_on_unknown + accuracy_on_known) / 2)
