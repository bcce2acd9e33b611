"""Request rates of API keys, counted across all workers."""

import asyncio

import httpx

from knowgate.server.auth.access_control import RateLimiter
from knowgate.server.auth.api_keys import add_key, read_keys
from knowgate.server.json_api import ApiError

BODY = {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}


def post(address, key, **fields):
    url, headers = f"{address}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
    return httpx.post(url, json={**BODY, **fields}, headers=headers, timeout=30)


def test_a_key_above_its_rate_is_answered_429_with_retry_after(serve, tmp_path):
    key = add_key(tmp_path / "keys.json", "app", rate=2)
    address, _ = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    replies = [post(address, key) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[2].json()["error"]["code"] == "rate"
    assert 1 <= int(replies[2].headers["retry-after"]) <= 30


def test_the_rate_of_one_key_does_not_limit_others(serve, tmp_path):
    slow, free = (add_key(tmp_path / "keys.json", name, rate=rate) for name, rate in (("slow", 1), ("free", None)))
    address, _ = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    assert [post(address, key).status_code for key in (slow, slow, free, free)] == [200, 429, 200, 200]


def admitted(limiter, key):
    try:
        asyncio.run(limiter.admit(key))
    except ApiError:
        return False
    return True


def test_workers_share_the_rate_of_a_key_and_it_recovers_with_time(tmp_path):
    add_key(tmp_path / "keys.json", "app", rate=2)
    (key,), now = read_keys(tmp_path / "keys.json"), [1000.0]
    first, second = (RateLimiter(tmp_path / "keys.json", clock=lambda: now[0]) for _ in range(2))
    assert [admitted(first, key), admitted(second, key), admitted(first, key)] == [True, True, False]
    now[0] += 30  # a minute / 2
    assert [admitted(second, key), admitted(first, key)] == [True, False]
    first.close()
    second.close()


def test_requests_pass_if_the_counter_store_is_unavailable(serve, tmp_path):
    key = add_key(tmp_path / "keys.json", "app", rate=1)
    (tmp_path / "keys.json.used.db").mkdir()
    address, _ = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    assert [post(address, key).status_code for _ in range(2)] == [200, 200]
