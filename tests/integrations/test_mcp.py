"""The MCP server with the client of the SDK: in-process, over stdio and over streamable HTTP."""

import asyncio
import json
import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")
from mcp import Client, StdioServerParameters

from knowgate.data.history.entries import KnowledgeLabel
from knowgate.data.history.sqlite_store import SqliteHistory
from knowgate.errors import BadSetting
from knowgate.gates import load_gate
from knowgate.integrations.mcp import create_mcp_server, run_mcp_server
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.traffic_log import TrafficLog
from tests.integrations.conftest import KNOWN, TABLE, UNKNOWN
from tests.support.hash_embedder import HashEmbedder
from tests.support.processes import child, until


def call_tools(server, *calls):
    """Call tools in order and return their results; an error is returned as its text."""

    async def run():
        async with Client(server) as client:
            results = [await client.call_tool(name, arguments) for name, arguments in calls]
            return [result.content[0].text if result.is_error else result.structured_content for result in results]

    return asyncio.run(run())


def test_the_tools_have_schemas_and_the_gate_has_a_card(rag):
    async def run():
        async with Client(create_mcp_server(rag)) as client:
            tools = (await client.list_tools()).tools
            card = await client.read_resource("knowgate://gate")
            return {item.name: item.output_schema for item in tools}, card.contents[0].text

    tools, card = asyncio.run(run())
    assert sorted(tools) == ["ask", "decide", "feedback", "search"]
    assert {"retrieve", "need", "threshold", "reason"} <= set(tools["decide"]["properties"])
    assert card.startswith("# Gate logprob")
    assert "- LLM: fake" in card


def test_decide_separates_known_and_unknown_questions_and_small_call_tools(rag):
    known, unknown, thanks = call_tools(
        create_mcp_server(rag),
        *(("decide", {"question": text}) for text in (KNOWN, UNKNOWN, "thanks")),
    )
    assert [item["retrieve"] for item in (known, unknown, thanks)] == [False, True, False]
    assert thanks["rule"] == "thanks"


def test_ask_searches_only_if_needed(rag, retriever):
    known, unknown = call_tools(create_mcp_server(rag), ("ask", {"question": KNOWN}), ("ask", {"question": UNKNOWN}))
    assert (known["answer"], known["passages"]) == ("William Shakespeare", [])
    assert (unknown["answer"], unknown["passages"][0]["id"]) == ("Mira", "canteen")
    assert retriever.asked == [UNKNOWN]


def test_search_ignores_the_gate(rag):
    (found,) = call_tools(create_mcp_server(rag), ("search", {"query": KNOWN}))
    assert [(item["id"], item["score"]) for item in found["passages"]] == [("canteen", 2.0)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("search", {"query": "x", "k": 0}), "k=0 is not allowed: it must be at least 1 and at most 100."),
        (("ask", {"question": "  "}), "the question is empty"),
        (("feedback", {"id": "none", "rating": "up"}), "there is no answer with the id 'none'"),
        (("feedback", {"id": "none", "rating": "sideways"}), "up"),
    ],
)
def test_invalid_arguments_are_explained_to_the_client(rag, call, message):
    (error,) = call_tools(create_mcp_server(rag), call)
    assert message in error


def test_a_search_without_documents_explains_what_to_do():
    rag = AdaptiveRAG(FakeModel(TABLE), load_gate("never"))
    (error,) = call_tools(create_mcp_server(rag), ("search", {"query": "x"}))
    assert "Start the server with `docs` or `index`" in error


def test_a_failing_gate_is_an_error_or_falls_open(broken):
    call = ("decide", {"question": KNOWN})
    (error,) = call_tools(create_mcp_server(broken(False).rag), call)
    assert "logprobs" in error
    (open_,) = call_tools(create_mcp_server(broken(False).rag, fall_open=True), call)
    assert (open_["retrieve"], open_["notes"]) == (True, ["gate failed"])


def test_informative_feedback_becomes_a_label(retriever, tmp_path):
    store = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    log = TrafficLog(store)
    rag = AdaptiveRAG(FakeModel(TABLE), load_gate("logprob:mean"), retriever, log=log)

    async def run():
        async with Client(create_mcp_server(rag)) as client:
            ids = [(await client.call_tool("ask", {"question": q})).structured_content["id"] for q in (KNOWN, UNKNOWN)]
            feedbacks = [{"rating": "up"}, {"rating": "down", "correction": "Mira"}]
            return [
                (await client.call_tool("feedback", {"id": answer_id, **feedback})).structured_content["learnt"]
                for answer_id, feedback in zip(ids, feedbacks, strict=True)
            ]

    assert asyncio.run(run()) == [True, True]
    log.close()
    labels = {entry.question: entry.label for entry in store.entries() if entry.source == "human"}
    assert labels == {KNOWN: KnowledgeLabel.KNOWN, UNKNOWN: KnowledgeLabel.UNKNOWN}


@pytest.mark.parametrize(("rating", "label"), [("up", KnowledgeLabel.KNOWN), ("down", KnowledgeLabel.UNKNOWN)])
def test_a_rating_of_a_draft_that_the_arbiter_gave_labels_what_the_llm_knows(retriever, tmp_path, rating, label):
    class AbstainingModel(FakeModel):
        def _answer(self, prompt):
            return "I don't know." if "canteen" in prompt.text else super()._answer(prompt)

    store = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    log = TrafficLog(store)
    rag = AdaptiveRAG(AbstainingModel(TABLE), load_gate("logprob:mean"), retriever, threshold=0.0, log=log)

    async def run():
        async with Client(create_mcp_server(rag)) as client:
            answer = (await client.call_tool("ask", {"question": KNOWN})).structured_content
            await client.call_tool("feedback", {"id": answer["id"], "rating": rating})
            return answer

    answer = asyncio.run(run())
    assert (answer["answer"], len(answer["passages"])) == ("William Shakespeare", 1)
    log.close()
    assert [entry.label for entry in store.entries() if entry.source == "human"] == [label]


def test_feedback_without_a_log_is_not_stored(rag):
    async def run():
        async with Client(create_mcp_server(rag)) as client:
            id = (await client.call_tool("ask", {"question": KNOWN})).structured_content["id"]
            return (await client.call_tool("feedback", {"id": id, "rating": "up"})).structured_content

    feedback = asyncio.run(run())
    assert feedback["learnt"] is False
    assert "Start the server with `log`" in feedback["note"]


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "canteen.txt").write_text("Mira runs the canteen of Balaland.", encoding="utf-8")
    (tmp_path / "table.json").write_text(json.dumps(TABLE), encoding="utf-8")
    options = ["--model", f"fake:{tmp_path / 'table.json'}", "--gate", "logprob:mean", "--docs", str(tmp_path / "docs")]
    return [sys.executable, "-m", "knowgate", "mcp", *options], {**os.environ, "KNOWGATE_CACHE": str(tmp_path)}


@pytest.mark.process
def test_the_command_serves_over_stdio(command):
    (program, *arguments), env = command
    server = StdioServerParameters(command=program, args=arguments, env=env)
    decided, answered = call_tools(server, ("decide", {"question": KNOWN}), ("ask", {"question": UNKNOWN}))
    assert decided["retrieve"] is False
    assert (answered["answer"], answered["passages"][0]["text"]) == ("Mira", "Mira runs the canteen of Balaland.")


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def is_open(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.process
def test_the_command_serves_over_streamable_http(command):
    (line, env), port = command, free_port()
    with child([*line, "--http", "--port", str(port)], env=env, stderr=subprocess.DEVNULL) as process:
        until(lambda: is_open(port), process)
        url = f"http://127.0.0.1:{port}/mcp"
        decided, answered = call_tools(url, ("decide", {"question": "thanks"}), ("ask", {"question": UNKNOWN}))
    assert (decided["retrieve"], answered["answer"]) == (False, "Mira")


def test_a_host_that_other_machines_can_reach_is_an_error(rag):
    with pytest.raises(BadSetting, match="this server has no authentication"):
        run_mcp_server(rag, http=True, host="0.0.0.0")
