"""`knowgate ask` answers questions; `knowgate decide` only says which of them need retrieval."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from knowgate.cli.console import create_console, inform, print_json
from knowgate.cli.options import ConfigFile, JsonOption, NoRules, load_command_settings, path_option
from knowgate.cli.questions import read_arguments
from knowgate.core.display import sanitize_text
from knowgate.core.validation import parse_json
from knowgate.errors import BadInput
from knowgate.gates import PACKAGED_GATES
from knowgate.gates.artifacts.drift import compute_far_share, format_far_warning
from knowgate.gates.fitted_gate import FittedGate
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import answer_record, decision_record
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.conversation import Conversation, question_from_messages
from knowgate.pipeline.settings import DecisionOptions, PipelineOptions
from knowgate.types import Answer, AnswerEvent, Decision, DecisionEvent, Model, Question, TextEvent
from knowgate.types.markup import shorten

QuestionArguments = Annotated[
    list[str] | None, typer.Argument(help="Questions. Default: read from standard input, one per line.")
]
RecordFolder = Annotated[Path | None, path_option("DIR", "Folder to record outputs to. Replay: --model replay:DIR.")]
Interactive = Annotated[
    bool, typer.Option("--interactive", "-i", help="Ask several questions in one conversation. An empty line ends it.")
]
Explain = Annotated[
    bool, typer.Option(help="Show what each decision is based on: scores, distance, similar questions and guarantee.")
]


def ask(
    questions: QuestionArguments = None,
    *,
    options: PipelineOptions,
    no_rules: NoRules = False,
    config: ConfigFile = None,
    record: RecordFolder = None,
    interactive: Interactive = False,
    explain: Explain = False,
    as_json: JsonOption = False,
) -> None:
    """Answer questions, and search for passages only when the gate says so.

    Each line of standard input is a question or a JSON object. Examples of objects: {"question": "Who wrote Hamlet?"},
    {"messages": [{"role": "user", "content": "Who wrote Hamlet?"}]}.
    """
    settings = load_command_settings(config, options, no_rules)
    lines = None if interactive else read_arguments(questions)  # bad input is reported before a model is loaded
    rag = build_pipeline(settings, record)
    _print_guarantee(rag, explain)
    try:
        if lines is None:  # interactive
            _run_conversation(rag, questions or [], explain=explain, as_json=as_json)
        else:
            # A single answer is printed while it is generated, if a person watches.
            live = not as_json and len(questions or ()) == 1 and sys.stdout.isatty()
            _answer_all(rag, lines, live=live, explain=explain, as_json=as_json)
    finally:
        _close_log(rag)


def _close_log(rag: AdaptiveRAG) -> None:
    """Close the log of questions, if there is one, and print how many were logged."""
    if rag.log is not None:  # with --log
        rag.log.close()
        counts = f"{rag.log.n_labeled} of {rag.log.n_questions} questions"
        inform(f"{counts} were logged: those with an answer both with and without passages.")


def _answer_all(rag: AdaptiveRAG, lines: Iterator[Question], *, live: bool, explain: bool, as_json: bool) -> None:
    """Print the answer to each question, then warnings about cut-off answers and unusual questions.

    Args:
        rag: The pipeline that answers.
        lines: Lines of input, each as a `Question` whose text is the whole line, which may be JSON.
        live: Print each answer while it is generated.
        explain: Also print what each decision is based on.
        as_json: Print JSON records instead of text.
    """
    questions = (_parse_question_line(rag.model, line) for line in lines)
    answers = map(partial(show_streamed_answer, rag), questions) if live else _print_answers(rag, questions, as_json)
    training_distances = []  # how far each question is from the questions that the gate was fitted on
    is_any_cut_off = False
    for answer in answers:
        training_distances.append(answer.decision.distance)
        is_any_cut_off |= not answer.finished
        if explain and not as_json:
            show_decision_basis(answer.decision)
    if is_any_cut_off and not as_json:
        _print_truncation_notice(rag)
    _warn_about_far_questions(rag, training_distances)


def _print_answers(rag: AdaptiveRAG, questions: Iterator[Question], as_json: bool) -> Iterator[Answer]:
    """Print each answer when it is complete, and yield it."""
    for answer in rag.stream(questions, first=1):  # batches of 1, 2, 4, ... questions
        if as_json:
            print_json(answer_record(answer, rag))
        else:
            show_answer(answer)
        yield answer


def decide(
    questions: QuestionArguments = None,
    *,
    options: DecisionOptions,
    no_rules: NoRules = False,
    config: ConfigFile = None,
    record: RecordFolder = None,
    explain: Explain = False,
    as_json: JsonOption = False,
) -> None:
    """Say for each question whether it needs retrieval, without retrieving or answering."""
    settings = load_command_settings(config, options, no_rules)
    lines = read_arguments(questions)  # bad input is reported before a model is loaded
    rag = build_pipeline(settings, record, retrieves=False)
    _print_guarantee(rag, explain)
    parsed = (_parse_question_line(rag.model, line) for line in lines)
    training_distances = []  # how far each question is from the questions that the gate was fitted on
    for question, decision in rag.decide_stream(parsed, first=1):  # batches of 1, 2, 4, ... questions
        training_distances.append(decision.distance)
        if as_json:
            id_field = {"id": question.id} if question.id else {}  # a single question has no id
            print_json({**id_field, "question": question.text, **decision_record(decision), "model": rag.model.name})
        else:
            _show_decided_question(question, decision, explain)
    _warn_about_far_questions(rag, training_distances)


def _show_decided_question(question: Question, decision: Decision, explain: bool) -> None:
    """Print a question with the decision and its reason. With `explain`, also print the details."""
    text = f"  {sanitize_text(question.text)}  "
    create_console().print(Text.assemble(format_verdict(decision), text, (sanitize_text(decision.reason), "dim")))
    if explain:
        show_decision_basis(decision)


def _print_guarantee(rag: AdaptiveRAG, explain: bool) -> None:
    """Print the gate's accuracy guarantee if asked to.

    Otherwise warn if the guarantee of a user's own gate does not hold.
    """
    if explain:
        if rag.guarantee:  # "" if no accuracy is guaranteed
            inform(rag.guarantee)
        return
    gate = rag.bound_gate
    is_own = isinstance(gate, FittedGate) and not gate.artifact.path.is_relative_to(PACKAGED_GATES)
    if is_own and rag.guarantee_violations:
        inform(f"The guarantee of the gate '{gate.name}' does not hold here: {'; '.join(rag.guarantee_violations)}.")


def _print_truncation_notice(rag: AdaptiveRAG) -> None:
    """Tell the user that the token limit cut an answer off."""
    inform(f"… answer cut off at {rag.max_tokens} tokens; change it with --max-tokens")


def _warn_about_far_questions(rag: AdaptiveRAG, distances: Sequence[float | None]) -> None:
    """Print a warning if too many questions are unlike the gate's training questions.

    Args:
        rag: The pipeline that decided.
        distances: Distance of each question from the training questions of the gate; None if the gate reports none.
    """
    warning = format_far_warning(rag.bound_gate.name, compute_far_share(distances), len(distances))
    if warning:  # "" if few questions are far
        inform(warning)


# --- conversations --------------------------------------------------------------------------------


def _run_conversation(rag: AdaptiveRAG, first: Sequence[str], *, explain: bool, as_json: bool) -> None:
    """Answer questions as one conversation. Standard input follows the given questions."""
    conversation = Conversation(rag)
    for number, text in enumerate(_read_conversation(first), start=1):
        if as_json:
            answer = rag.answer(conversation.rewrite(text, str(number)))
            print_json(answer_record(answer, rag))
        else:
            answer = _show_turn(rag, conversation.rewrite(text, ""), explain)
        conversation.remember(answer)


def _show_turn(rag: AdaptiveRAG, question: Question, explain: bool) -> Answer:
    """Answer a question of a conversation, and print the answer while it is generated."""
    show_rewritten_question(question)
    answer = show_streamed_answer(rag, question)
    if not answer.finished:
        _print_truncation_notice(rag)
    if explain:
        show_decision_basis(answer.decision)
    return answer


def _read_conversation(first: Sequence[str]) -> Iterator[str]:
    """Yield the given questions, then lines of standard input until an empty line or the end."""
    yield from first
    while True:
        if sys.stdin.isatty():
            inform("> ", end="")
        text = sys.stdin.readline().strip()
        if not text:
            return
        yield text


def _parse_question_line(model: Model, line: Question) -> Question:
    """Return the question of an input line: plain text, a JSON object with a question, or a chat.

    The model rewrites the last question of a chat to stand alone.

    Raises:
        BadInput: The line looks like a chat, but its JSON or its messages are invalid.
    """
    where = f"line {line.id or 1}"
    record = _parse_record(line.text, where)
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadInput(f"{where}: 'messages' must be a list of objects, each with 'role' and 'content'.")
        return question_from_messages(model, messages, line.id)
    text = record.get("question")
    return replace(line, text=text) if isinstance(text, str) and text.strip() else line


def _parse_record(line: str, where: str) -> dict[str, Any]:
    """Parse the JSON object of a line. Other lines are questions in plain text, and give {}."""
    record: dict[str, Any] = {}
    try:
        if line.startswith("{"):
            record = parse_json(line, where)
    except BadInput:
        if '"messages"' in line:  # a chat with a mistake, not a question that begins with a brace
            raise
    return record


MAX_PASSAGE_WIDTH = 90  # characters of a passage that are printed


def show_answer(answer: Answer) -> None:
    """Print an answer, the decision whether to retrieve, and the retrieved passages."""
    if answer.question.id:
        create_console().print(Text(f"{answer.question.id}. {sanitize_text(get_original_text(answer.question))}"))
    show_rewritten_question(answer.question)
    create_console().print(Text(sanitize_text(answer.text) + _format_ending(answer), style="bold"))
    show_decision(answer.decision)
    show_sources(answer)


def get_original_text(question: Question) -> str:
    """Return the question as the user typed it, before a follow-up was rewritten as a standalone question."""
    return str(question.meta.get("asked", question.text))


def show_rewritten_question(question: Question) -> None:
    """Print the rewritten question, if there is one."""
    if get_original_text(question) != question.text:
        create_console().print(Text(f"  understood as: {sanitize_text(question.text)}", style="dim"))


def show_streamed_answer(rag: AdaptiveRAG, question: Question) -> Answer:
    """Answer a question, and print each part as soon as it is known.

    Returns:
        The complete answer.
    """
    shown_decision = None
    with closing(rag.answer_stream(question)) as events, closing(StreamedLine()) as line:
        for event in events:
            if isinstance(event, DecisionEvent):
                shown_decision = event.decision
                show_decision(shown_decision)
            elif isinstance(event, TextEvent):
                line.add(event.text)
            elif isinstance(event, AnswerEvent):  # the last event, with the complete answer
                answer = event.answer
        line.add(_format_ending(answer))
    if answer.decision != shown_decision:  # the final decision may have more notes
        show_decision(answer.decision)
    show_sources(answer)
    return answer


@dataclass
class StreamedLine:
    """A line of output that grows piece by piece.

    Attributes:
        is_open: Whether text was printed to the line that `close` has not ended yet.
    """

    is_open: bool = False

    def add(self, text: str) -> None:
        """Print text at the end of the line, without starting a new line."""
        if not text:
            return
        self.is_open = True  # `close` must end the line
        create_console().print(Text(sanitize_text(text), style="bold"), end="")

    def close(self) -> None:
        """End the line if any text was printed to it."""
        if self.is_open:
            create_console().print()
        self.is_open = False


def show_decision(decision: Decision) -> None:
    """Print the decision, 'retrieve' or 'skip', with its reason."""
    create_console().print(Text.assemble("  ", format_verdict(decision), ": ", (sanitize_text(decision.reason), "dim")))


def show_sources(answer: Answer) -> None:
    """Print the retrieved passages. The time is printed only for single questions."""
    console = create_console()
    for passage in answer.passages:
        text = shorten(passage.text, MAX_PASSAGE_WIDTH)
        console.print(f"  · {sanitize_text(passage.id)}: {sanitize_text(text)}", style="dim")
    if answer.batch_size == 1:
        console.print(f"  {answer.seconds['total']:.2f} s", style="dim")


def show_decision_basis(decision: Decision) -> None:
    """Print the gate's details about a decision. These are the distance, the raw score and similar logged questions."""
    console = create_console()
    if decision.distance is not None:
        text = f"distance {decision.distance:.2f} from the questions the gate was fitted on; 99 % of them are within 1"
        console.print(f"  {text}", style="dim")
    if decision.raw is not None:
        console.print(f"  need {decision.need:.4f}, calibrated from the raw score {decision.raw:.4f}", style="dim")
    for neighbor in decision.neighbors:
        outcome = f", retrieval: {neighbor.outcome}" if neighbor.outcome else ""
        text = f"{neighbor.similarity:.2f} {neighbor.label}{outcome} ({neighbor.source}): {neighbor.question}"
        console.print(f"  ~ {sanitize_text(text)}", style="dim")


def format_verdict(decision: Decision) -> tuple[str, str]:
    """Return the word for a decision, 'retrieve' or 'skip', and its color on the terminal."""
    return ("retrieve", "yellow") if decision.retrieve else ("skip", "green")


def _format_ending(answer: Answer) -> str:
    """Return an ellipsis for an answer that the token limit cut off."""
    return "" if answer.finished else "…"
