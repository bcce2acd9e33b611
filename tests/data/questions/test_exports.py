"""Exports of LangSmith, Langfuse and Phoenix, in the shapes their documentation shows."""

import json

import pytest

from knowgate.cli.main import run
from knowgate.data.questions import load_questions
from knowgate.data.runs.folder import open_run
from knowgate.errors import BadInput

LANGSMITH = {
    "id": "0190-a",
    "name": "chain",
    "run_type": "chain",
    "inputs": {"question": "Who wrote Emma?"},
    "outputs": {"answer": "Jane Austen"},
    "reference_example_id": "e1",
    "reference_outputs": {"answer": "Austen"},
    "feedback_stats": {},
    "total_tokens": 120,
}
LANGFUSE = {
    "id": "t-1",
    "name": "qa",
    "input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who wrote Emma?"}],
    "output": {"role": "assistant", "content": "Jane Austen"},
    "expectedOutput": "Austen",
    "latency": 0.5,
}
PHOENIX = {
    "context.span_id": "s1",
    "name": "ChatCompletion",
    "span_kind": "LLM",
    "attributes.input.value": json.dumps({"messages": [{"role": "user", "content": "Who wrote Emma?"}]}),
    "attributes.output.value": json.dumps({"choices": [{"message": {"role": "assistant", "content": "Jane Austen"}}]}),
    "reference_output": "Austen",
}
CHAT = {
    "id": "0190-b",
    "run_type": "llm",
    "inputs": {"messages": [[{"id": ["langchain", "HumanMessage"], "kwargs": {"content": "Who wrote Emma?"}}]]},
    "outputs": {"generations": [[{"text": "Jane Austen", "message": {}}]]},
    "reference": "Austen",
}
SHAPES = {"langsmith": LANGSMITH, "langfuse": LANGFUSE, "phoenix": PHOENIX, "langsmith-chat": CHAT}


@pytest.mark.parametrize("tool", SHAPES)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_questions_and_answers_are_read_from_the_fields_of_each_tool(tmp_path, tool, ending):
    record, file = SHAPES[tool], tmp_path / f"export.{ending}"
    file.write_text(json.dumps(record) if ending == "jsonl" else json.dumps({"data": [record]}), encoding="utf-8")
    (one,) = load_questions(f"{tool.partition('-')[0]}:{file}")
    assert (one.text, one.answers, one.meta["answer"]) == ("Who wrote Emma?", ("Austen",), "Jane Austen")
    assert one.id in (record.get("id"), record.get("context.span_id"))


def test_spans_are_read_from_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist([PHOENIX]), tmp_path / "spans.parquet")
    (one,) = load_questions(f"phoenix:{tmp_path / 'spans.parquet'}")
    assert (one.text, one.meta["answer"]) == ("Who wrote Emma?", "Jane Austen")


def test_a_label_run_is_imported_from_an_export(tmp_path):
    file = tmp_path / "runs.jsonl"
    rows = [LANGSMITH, {**LANGSMITH, "id": "0190-c", "outputs": {"answer": "Brontë"}}]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    line = ["import-answers", "--data", f"langsmith:{file}", "--model", "gpt", "--closed", "answer"]
    assert run([*line, "--out", str(tmp_path / "run")]) == 0
    assert [row.closed.correct for row in open_run(tmp_path / "run").rows()] == [True, False]


def test_grades_are_imported_from_the_scores_of_an_export(tmp_path):
    file = tmp_path / "traces.jsonl"
    rows = [{**LANGFUSE, "id": str(n), "scores": [{"name": "quality", "value": n / 4}]} for n in range(5)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    line = ["import-answers", "--data", f"langfuse:{file}", "--model", "gpt", "--closed", "answer"]
    line += ["--closed-correct", "scores.quality", "--pass-score", "0.75", "--closed-seconds", "latency"]
    assert run([*line, "--out", str(tmp_path / "run")]) == 0
    answers = [row.closed for row in open_run(tmp_path / "run").rows()]
    assert [answer.correct for answer in answers] == [False, False, False, True, True]
    assert {answer.seconds for answer in answers} == {0.5}


def test_fields_can_be_named_in_the_spec(tmp_path):
    file = tmp_path / "runs.jsonl"
    file.write_text(json.dumps({"in": {"ask": "Who?"}, "out": {"said": "Ada"}, "right": "Ada"}), encoding="utf-8")
    (one,) = load_questions(f"langfuse:{file}?question=in.ask&answer=out.said&answers=right")
    assert (one.text, one.meta["answer"], one.answers) == ("Who?", "Ada", ("Ada",))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"x": 1, "inputs": {}}', r"has no field named inputs.question or .*Name the field"),
        ("a.json", '{"x": 1}', "is not a list of JSON objects"),
        ("a.json", "[1]", "is not a list of JSON objects"),
    ],
)
def test_an_invalid_export_is_reported(tmp_path, name, text, said):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=said):
        load_questions(f"langsmith:{tmp_path / name}")
