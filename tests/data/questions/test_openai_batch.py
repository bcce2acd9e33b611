"""OpenAI's batch files, in the form its documentation shows."""

import json

import pytest

from knowgate.cli.main import run
from knowgate.data.questions import load_questions
from knowgate.data.runs.folder import open_run
from knowgate.errors import BadInput


def request(id, text):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    body = {"model": "gpt-4o-mini", "messages": messages, "max_tokens": 32}
    return {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def reply(id, text, status=200):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    response = {"status_code": status, "request_id": "r", "body": {"id": "c", "choices": [choice]}}
    return {"id": "batch_req_1", "custom_id": id, "response": response, "error": None}


@pytest.fixture
def files(tmp_path):
    def write(name, rows):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
        return tmp_path / name

    return write


def test_requests_and_results_are_joined_by_their_ids(files, tmp_path):
    asked = files("asked.jsonl", [request("a", "Who wrote Emma?"), request("b", "Capital of Peru?")])
    closed = files("closed.jsonl", [reply("b", "Cusco"), reply("a", "Jane Austen")])
    opened = files("open.jsonl", [reply("a", "Jane Austen"), reply("b", "Lima")])
    gold = files("gold.jsonl", [{"custom_id": "a", "answers": ["Austen"]}, {"custom_id": "b", "answers": "Lima"}])
    data = f"openai-batch:{asked}?closed={closed}&open={opened}&gold={gold}"
    assert [(one.id, one.text, one.answers) for one in load_questions(data)] == [
        ("a", "Who wrote Emma?", ("Austen",)),
        ("b", "Capital of Peru?", ("Lima",)),
    ]
    line = ["import-answers", "--data", data, "--model", "gpt-4o-mini", "--closed", "closed", "--open", "open"]
    assert run([*line, "--out", str(tmp_path / "run")]) == 0
    rows = list(open_run(tmp_path / "run").rows())
    assert [(row.closed.correct, row.open.correct) for row in rows] == [(True, True), (False, True)]


def test_a_failed_request_is_reported(files):
    asked = files("asked.jsonl", [request("a", "Who?")])
    failed = files("closed.jsonl", [reply("a", "x", status=429)])
    with pytest.raises(BadInput, match=r"'a' has no successful result in .*run it"):
        load_questions(f"openai-batch:{asked}?closed={failed}")


def test_a_file_that_is_not_a_batch_is_reported(files):
    with pytest.raises(BadInput, match="has no 'custom_id'"):
        load_questions(f"openai-batch:{files('a.jsonl', [{'question': 'x'}])}")
