"""The stock `openai` client in front of a real llama.cpp server, and of the embedded model in this process."""

import openai
import pytest

import knowgate as kg
from knowgate.server.app import create_app
from knowgate.server.options import ServeOptions
from tests.support.llama_server import NAME, running_llama
from tools.local_server import run_server

pytestmark = pytest.mark.model
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def llama():
    pytest.importorskip("xllamacpp")
    with running_llama() as url:
        yield url


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    file = tmp_path_factory.mktemp("docs") / "docs.jsonl"
    file.write_text('{"id": "d1", "text": "The capital of France is Paris. Code name of the plan: Quokka."}\n')
    return file


@pytest.fixture(scope="module")
def in_front(llama, docs):
    """Of llama.cpp; its own first token decides."""
    settings = kg.PipelineOptions(gate="logprob:first", docs=docs)
    with run_server(create_app(settings, ServeOptions(upstream=llama, gate_seconds=120))) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def embedded(docs):
    settings = kg.PipelineOptions(model="smollm", gate="logprob:first", docs=docs, max_tokens=12)
    with run_server(create_app(settings, ServeOptions(gate_seconds=120))) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.mark.parametrize("retrieves", ["always", "never", "auto"])
def test_a_chat_is_answered_by_llama_cpp(in_front, retrieves):
    reply = in_front.chat.completions.create(
        model=NAME, messages=FRANCE, max_tokens=12, temperature=0, extra_body={"knowgate": {"retrieve": retrieves}}
    )
    report = reply.model_extra["knowgate"]
    assert "Paris" in reply.choices[0].message.content or not report["retrieve"]
    assert retrieves == "auto" or report["retrieve"] is (retrieves == "always")
    assert report["degraded"] == []
    assert reply.usage.completion_tokens > 0


@pytest.mark.parametrize("retrieves", ["always", "auto"])
def test_a_chat_is_streamed_by_llama_cpp(in_front, retrieves):
    chunks = list(
        in_front.chat.completions.create(
            model="knowgate", messages=FRANCE, max_tokens=12, temperature=0, stream=True,
            extra_body={"knowgate": {"retrieve": retrieves}},
        )
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    report = [chunk.model_extra["knowgate"] for chunk in chunks if chunk.model_extra.get("knowgate")]
    assert "Paris" in text or not report[0]["retrieve"]
    assert len(report) == 2
    assert report[0]["id"] == report[1]["id"]
    assert all(not chunk.choices or chunk.choices[0].logprobs is None for chunk in chunks)


def test_tools_their_results_and_json_mode_reach_llama_cpp(in_front):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    done = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    fields = {"model": NAME, "max_tokens": 8, "temperature": 0}
    offered = in_front.chat.completions.create(messages=FRANCE, tools=[TOOL], **fields)
    after = in_front.chat.completions.create(messages=[*FRANCE, *done], tools=[TOOL], **fields)
    json_mode = {**fields, "max_tokens": 40, "response_format": {"type": "json_object"}}
    shaped = in_front.chat.completions.create(messages=FRANCE, **json_mode)
    assert offered.model_extra["knowgate"]["gated"] is True
    assert "role 'tool'" in after.model_extra["knowgate"]["why_not"]
    assert shaped.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize("streamed", [False, True])
def test_errors_of_llama_cpp_are_forwarded(in_front, streamed):
    with pytest.raises(openai.BadRequestError, match="Field 'temperature'") as refused:
        in_front.chat.completions.create(model=NAME, messages=FRANCE, temperature="warm", max_tokens=4, stream=streamed)
    assert refused.value.response.headers["x-knowgate-id"]


def test_the_models_of_llama_cpp_are_listed_first(in_front):
    assert next(card.id for card in in_front.models.list()) == NAME


def test_a_completion_is_forwarded_to_llama_cpp(in_front):
    reply = in_front.completions.create(model=NAME, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert reply.choices[0].text
    assert reply.model_extra["knowgate"]["gated"] is True


@pytest.mark.parametrize("streamed", [False, True])
def test_the_embedded_model_answers_the_same_client(embedded, streamed):
    asked = {"model": "knowgate/always", "messages": FRANCE, "max_tokens": 12}
    if streamed:
        chunks = list(embedded.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        report = chunks[-1].model_extra["knowgate"]
    else:
        reply = embedded.chat.completions.create(**asked)
        text, report = reply.choices[0].message.content, reply.model_extra["knowgate"]
    assert "Paris" in text
    assert [item["id"] for item in report["passages"]] == ["d1"]


def test_unsupported_fields_are_an_error_that_the_openai_client_understands(embedded):
    with pytest.raises(openai.BadRequestError, match="only by servers with an upstream"):
        embedded.chat.completions.create(model="knowgate", messages=FRANCE, tools=[TOOL])
    with pytest.raises(openai.NotFoundError):
        embedded.chat.completions.create(model="gpt-99", messages=FRANCE)
