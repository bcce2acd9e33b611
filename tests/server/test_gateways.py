"""LLM gateways in front of the server and behind it, with the configurations of the documentation."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.server.test_chat import ask

CONFIG = Path(__file__).parents[2] / "deploy" / "litellm.yaml"
ENVOY = CONFIG.with_name("envoy.yaml")
COMMAND = os.environ.get("LITELLM") or shutil.which("litellm")
START_SECONDS = 180
MASTER_KEY = f"sk-{secrets.token_hex(32)}"  # LiteLLM refuses known keys


def find_free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def chain(serve, stub, tmp_path, monkeypatch):
    """LiteLLM -> knowgate -> LiteLLM -> stub. Returns the addresses of LiteLLM and of knowgate."""
    port = find_free_port()
    monkeypatch.setenv("OPENAI_API_KEY", MASTER_KEY)
    options = {"upstream": f"http://127.0.0.1:{port}/v1", "upstream_model": "llm"}
    address, _ = serve(upstream=False, gate="always", options=options)
    environment = os.environ | {
        "LLM_URL": stub.url,
        "KNOWGATE_URL": f"{address}/v1",
        "LITELLM_MASTER_KEY": MASTER_KEY,
        "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [str(COMMAND), "--config", str(CONFIG), "--port", str(port), "--host", "127.0.0.1"]
    with (tmp_path / "litellm.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_SECONDS
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health/liveliness", timeout=5)
                    break
                except httpx.HTTPError:
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}", address
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.skipif(COMMAND is None, reason="needs the command litellm, of litellm[proxy], or its path in $LITELLM")
def test_litellm_works_in_front_of_the_server_and_behind_it(chain, stub):
    gateway, address = chain
    behind = ask(address, model="knowgate")
    assert behind.status_code == 200, behind.text
    assert behind.json()["choices"][0]["message"]["content"] == "From the passages: 43."
    body = {"model": "knowgate", "messages": [{"role": "user", "content": "What is the capital of Babakoland?"}]}
    headers = {"Authorization": f"Bearer {MASTER_KEY}"}
    before = httpx.post(f"{gateway}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert before.status_code == 200, before.text
    assert before.json()["choices"][0]["message"]["content"] == "From the passages: 43."
    assert [sent["model"] for sent in stub.bodies] == ["llm", "llm"]
    streamed = httpx.post(f"{gateway}/v1/chat/completions", json={**body, "stream": True}, headers=headers, timeout=60)
    assert streamed.text.strip().endswith("data: [DONE]")


def test_the_configuration_names_the_models_of_the_documentation():
    text = CONFIG.read_text(encoding="utf-8")
    page = (CONFIG.parents[1] / "docs" / "server-operations.md").read_text(encoding="utf-8")
    assert "model_name: llm" in text
    assert "--upstream-model llm" in page
    assert "deploy/litellm.yaml" in page


def test_the_configuration_of_envoy_routes_to_its_own_clusters():
    resources = yaml.safe_load(ENVOY.read_text(encoding="utf-8"))["static_resources"]
    clusters = {cluster["name"]: cluster["load_assignment"]["endpoints"] for cluster in resources["clusters"]}
    targets = {}
    for listener in resources["listeners"]:
        (filter_chain,) = listener["filter_chains"]
        manager = filter_chain["filters"][0]["typed_config"]
        assert manager["http_filters"][-1]["name"] == "envoy.filters.http.router"
        (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
        assert route["route"]["timeout"] == "0s"  # the default of 15 s would cut streams
        targets[listener["address"]["socket_address"]["port_value"]] = route["route"]["cluster"]
    assert targets == {4000: "llm", 8000: "knowgate"}
    assert set(targets.values()) == set(clusters)
    assert len(clusters["llm"][0]["lb_endpoints"]) == 2
