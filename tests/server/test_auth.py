"""API keys and access control."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import knowgate as kg
from knowgate.server.auth import api_keys
from knowgate.server.auth.api_keys import add_key, read_keys, revoke_key
from knowgate.server.entrypoint import run_server
from knowgate.server.options import ServeOptions


def test_requests_need_a_valid_key_if_there_is_a_key_file(serve, stub, tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, "app")
    address, _ = serve(gate="never", options={"keys": str(file)})
    url, body = f"{address}/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}
    given = [
        {},
        {"Authorization": "Bearer kg-wrong"},
        {"Authorization": f"Basic {key}"},
        {"Authorization": f"Bearer {key}"},
    ]
    assert [httpx.post(url, json=body, headers=item).status_code for item in given] == [401, 401, 401, 200]
    assert httpx.get(f"{address}/metrics").status_code == 401
    assert httpx.get(f"{address}/health").status_code == 200
    assert all(key not in str(headers) for headers in stub.headers)


def test_a_request_with_two_logins_is_rejected(serve, stub, tmp_path):
    keys = tmp_path / "keys.json"
    key = add_key(keys, "one")
    address, _ = serve(gate="never", options={"keys": keys})
    logins = [("Authorization", f"Bearer {key}"), ("Authorization", "Bearer other")]
    reply = httpx.get(f"{address}/v1/models", headers=logins)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "several_logins")


def test_a_running_server_rejects_a_revoked_key(serve, tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, "app")
    address, _ = serve(gate="never", options={"keys": str(file)})
    asked = {"url": f"{address}/v1/models", "headers": {"Authorization": f"Bearer {key}"}}
    assert httpx.get(**asked).status_code == 200
    revoke_key(file, "app")
    assert httpx.get(**asked).status_code == 401


def test_the_key_file_contains_only_hashes(tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, "app")
    assert key not in file.read_text()
    assert [item.name for item in read_keys(file)] == ["app"]
    with pytest.raises(kg.KnowgateError, match="already"):
        add_key(file, "app")
    with pytest.raises(kg.KnowgateError, match="no API key named 'other'"):
        revoke_key(file, "other")


def test_keys_that_are_changed_at_the_same_time_are_all_stored(tmp_path, monkeypatch):
    file = tmp_path / "keys.json"
    add_key(file, "old")

    def read_slowly(path):
        keys = read_keys(path)
        time.sleep(0.05)
        return keys

    monkeypatch.setattr(api_keys, "read_keys", read_slowly)
    with ThreadPoolExecutor() as pool:
        pool.submit(revoke_key, file, "old")
        list(pool.map(lambda name: add_key(file, name), "abc"))
    assert {key.name for key in read_keys(file)} == {"a", "b", "c"}


def test_a_server_without_keys_listens_only_on_loopback(invented):
    with pytest.raises(kg.KnowgateError, match="needs API keys"):
        run_server(kg.PipelineOptions(), ServeOptions(host="0.0.0.0"))


def test_the_clients_key_is_forwarded_if_the_server_has_no_keys(serve, stub):
    address, _ = serve(gate="never")
    body = {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}
    headers = {"Authorization": "Bearer sk-mine", "OpenAI-Organization": "my-team"}
    httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers)
    assert headers.items() <= {**stub.headers[0], "OpenAI-Organization": stub.headers[0]["openai-organization"]}.items()


def test_the_clients_account_is_not_forwarded_with_the_key_of_the_server(serve, stub, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-server")
    address, _ = serve(gate="never")
    body = {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}
    httpx.post(f"{address}/v1/chat/completions", json=body, headers={"OpenAI-Organization": "other-team"})
    assert stub.headers[0]["Authorization"] == "Bearer sk-of-the-server"
    assert "openai-organization" not in stub.headers[0]


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}])
def test_cross_origin_requests_are_rejected(serve, stub, headers):
    address, _ = serve(gate="never")
    body = {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}
    reply = httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers
    assert stub.bodies == []


def test_token_budgets_in_key_files_of_earlier_versions_are_ignored(tmp_path):
    key = {"name": "app", "hash": "00", "created": 1.0, "rate": 60, "budget": 100_000}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [key]}))
    assert [(key.name, key.rate) for key in read_keys(tmp_path / "keys.json")] == [("app", 60)]


@pytest.mark.parametrize("name", ["", "a\nb", "a\x1b[31m", "a" * 101, "\u0430pp", "caf\u00e9"])
def test_a_key_needs_a_printable_name(tmp_path, name):
    with pytest.raises(kg.KnowgateError, match="1 to 100 printable"):
        add_key(tmp_path / "keys.json", name)


def test_a_broken_key_file_is_reported_with_the_field(tmp_path):
    (tmp_path / "keys.json").write_text('{"keys": [{"name": 3}]}')
    with pytest.raises(kg.KnowgateError, match=r"not a file of API keys: keys\.0\.name: it must be a text"):
        read_keys(tmp_path / "keys.json")


def test_a_server_is_not_ready_while_its_keys_cannot_be_read(serve, tmp_path):
    file = tmp_path / "keys.json"
    add_key(file, "alice")
    address, _ = serve(gate="never", options={"keys": str(file)})
    assert httpx.get(f"{address}/ready").status_code == 200
    content = file.read_bytes()
    file.unlink()
    reply = httpx.get(f"{address}/ready")
    assert (reply.status_code, reply.json()["degraded"]) == (503, ["the file of API keys cannot be read"])
    file.write_bytes(content)
    assert httpx.get(f"{address}/ready").status_code == 200
