"""A policy that was fitted on imported answers decides in a server exactly as in a pipeline."""

import logging

import httpx
import pytest

import knowgate as kg
from knowgate.data.runs.folder import RunFolder
from knowgate.errors import ArtifactError, BadSetting
from knowgate.gates.artifacts.gate_folder import read_artifact
from knowgate.labels.answer_import import ImportOptions, import_answers
from knowgate.labels.grading import StringGrader
from knowgate.pipeline.builder import build_pipeline
from knowgate.training.policy import candidates
from knowgate.training.policy.search import fit_policy
from knowgate.types import Question
from tests.server.conftest import UNKNOWN
from tests.support.extras import needs_train

pytestmark = needs_train
TALK = "Thanks!"


def make_question(i):
    """A question that the LLM answers right if and only if its first token is probable."""
    is_known = i % 2 == 0
    meta = {
        "alone": "right" if is_known else "wrong",
        "with": "right",
        "tokens": [-0.01, -0.01] if is_known else [-3.0, -3.0],
    }
    return Question(f"question {i}", id=str(i), answers=("right",), meta=meta)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    options = ImportOptions(closed="alone", open="with", logprobs="tokens")
    run = RunFolder(folder / "run")
    import_answers(run, [make_question(i) for i in range(600)], StringGrader(), llm="my-llm", data="x", options=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "DEFAULT_GATES", ())  # without the embedding model, which is slow to load
        return fit_policy(folder / "run", out=folder / "my-policy", topics="none").path


def ask(address, text):
    body = {"model": "knowgate", "messages": [{"role": "user", "content": text}]}
    return httpx.post(f"{address}/v1/chat/completions", json=body).json()["knowgate"]


@pytest.mark.parametrize("sure", [-0.01, -3.0])
@pytest.mark.parametrize("text", [UNKNOWN, TALK])
def test_a_server_decides_like_a_pipeline(serve, stub, invented, policy, sure, text):
    stub.sure = sure
    address, _ = serve(gate=str(policy))
    settings = kg.PipelineOptions(model=f"openai:my-llm@{stub.url}", docs=invented.docs, gate=str(policy))
    decision, report = build_pipeline(settings).decide(text), ask(address, text)
    assert read_artifact(policy).manifest["guarantee"]["retriever"]["fingerprint"] is None
    assert (report["retrieve"], report["degraded"]) == (decision.retrieve, [])
    assert report["retrieve"] == (sure < -1 and text != TALK)
    assert httpx.get(f"{address}/ready").json()["stale"] == ""


def test_a_server_says_once_that_the_answers_were_recorded(serve, policy, caplog):
    with caplog.at_level(logging.WARNING):
        address, app = serve(gate=str(policy))
        ask(address, UNKNOWN)
    lines = [record.getMessage() for record in caplog.records if "recorded answers of 'my-llm'" in record.getMessage()]
    assert len(lines) == 1
    assert "Make sure that the server runs the same LLM." in lines[0]
    assert app.state.service.gate_service.rag.guarantee.endswith("with the documents of that time.")


def test_a_request_that_demands_a_proof_retrieves_and_says_what_to_do(serve, policy):
    address, _ = serve(gate=str(policy))
    body = {"model": "knowgate", "messages": [{"role": "user", "content": UNKNOWN}], "knowgate": {"max_loss": 0.9}}
    report = httpx.post(f"{address}/v1/chat/completions", json=body).json()["knowgate"]
    assert (report["retrieve"], report["degraded"]) == (True, [])
    assert "fitted on imported answers, which do not record the documents. Run `knowgate label`" in report["reason"]


def test_the_same_name_is_accepted_and_another_is_not(serve, policy):
    serve(gate=str(policy), options={"upstream_model": "my-llm"})
    with pytest.raises(ArtifactError, match=r"fitted on recorded:my-llm .*Your LLM is .*stub-llm"):
        serve(gate=str(policy), options={"upstream_model": "stub-llm"})


def test_a_gate_that_needs_log_probabilities_is_refused_on_a_text_only_upstream(serve, stub, policy):
    stub.refuses = ("logprobs",)
    for gate in ("logprob:first", str(policy)):
        with pytest.raises(BadSetting, match="needs log-probabilities, but the upstream LLM server returns only text"):
            serve(gate=gate)


def test_an_upstream_that_cannot_be_asked_is_reported_and_the_server_starts(serve, stub, caplog):
    stub.status = 500
    with caplog.at_level(logging.WARNING):
        serve(gate="logprob:first")
    assert "It is unknown whether the upstream returns log-probabilities" in caplog.text


def test_a_server_loads_the_models_of_a_gate_before_the_first_request(serve, policy, monkeypatch):
    scored = []
    kind = type(kg.load_gate(str(policy)))
    score = kind.score
    monkeypatch.setattr(kind, "score", lambda self, *args: scored.append(1) or score(self, *args))
    serve(gate=str(policy))
    assert scored == [1]
    serve(gate="always", options={"gate_b": str(policy)})
    assert scored == [1, 1]


def test_a_policy_of_an_upstream_without_a_name_does_not_decide_for_another_llm_than_the_default(serve, policy):
    address, _ = serve(gate=str(policy))
    body = {"messages": [{"role": "user", "content": UNKNOWN}]}
    reports = [
        httpx.post(f"{address}/v1/chat/completions", json={"model": model, **body}).json()["knowgate"]
        for model in ("other-llm", "knowgate", "other-llm")
    ]
    assert [report["degraded"] for report in reports] == [[], [], ["stale calibration"]]
    assert "not on the LLM 'other-llm'" in reports[2]["reason"]


@pytest.mark.parametrize("path", ["chat/completions", "decide"])
@pytest.mark.parametrize("arm", ["a", "b"])
def test_a_policy_does_not_decide_for_another_llm_that_a_request_names(serve, stub, policy, path, arm):
    gates = {"gate": str(policy)} if arm == "a" else {"gate": "always"}
    second = {} if arm == "a" else {"gate_b": str(policy), "share_b": 1.0}
    address, _ = serve(**gates, options={"upstream_model": "my-llm", **second})

    def report(model):
        body = {"model": model, "messages": [{"role": "user", "content": UNKNOWN}]}
        reply = httpx.post(f"{address}/v1/{path}", json=body).json()
        return reply.get("knowgate", reply)

    assert report("my-llm")["degraded"] == report("knowgate")["degraded"] == []
    other = report("other-llm")
    assert (other["retrieve"], other["degraded"]) == (True, ["stale calibration"])
    assert "fitted on openai:my-llm, not on the LLM 'other-llm'" in other["reason"]


@pytest.mark.parametrize("path", ["completions", "decide"])
def test_a_separate_draft_comes_from_the_llm_that_the_request_names(serve, stub, path):
    address, _ = serve(gate="logprob:first", options={"upstream_model": "my-llm"})
    question = {"prompt": UNKNOWN} if path == "completions" else {"question": UNKNOWN}
    for model in ("other-llm", "knowgate"):
        httpx.post(f"{address}/v1/{path}", json={"model": model, **question})
    assert [body["model"] for body in stub.bodies if "messages" in body] == ["other-llm", "my-llm"]
