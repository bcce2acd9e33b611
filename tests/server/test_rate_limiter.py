"""Request rates of API keys, counted across all workers."""

import asyncio
import multiprocessing

import httpx
import pytest

from knowgate.cli.main import run
from knowgate.server.auth.access_control import RateLimiter
from knowgate.server.auth.api_keys import ApiKey, add_key, read_keys
from knowgate.server.database import RATE_LIMIT_TABLES, open_store
from knowgate.server.json_api import ApiError
from tests.support.processes import until

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
    assert 1 <= int(replies[2].headers["retry-after"]) <= 61


def test_the_dashboard_counts_rejected_requests_but_none_without_a_valid_key(serve, tmp_path):
    key = add_key(tmp_path / "keys.json", "app", rate=2)
    admin = add_key(tmp_path / "keys.json", "me", admin=True)
    address, _ = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    assert [post(address, name).status_code for name in [key] * 3 + ["none"]] == [200, 200, 429, 401]
    dashboard = httpx.get(f"{address}/v1/dashboard", headers={"Authorization": f"Bearer {admin}"}).json()
    assert dashboard["figures"]["requests"] == {"2xx": 2, "4xx": 1}


def test_the_rate_of_one_key_does_not_limit_others(serve, tmp_path):
    slow, free = (add_key(tmp_path / "keys.json", name, rate=rate) for name, rate in (("slow", 1), ("free", None)))
    address, _ = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    assert [post(address, key).status_code for key in (slow, slow, free, free)] == [200, 429, 200, 200]


def test_each_question_and_each_get_request_counts(serve, tmp_path):
    key = add_key(tmp_path / "keys.json", "app", rate=6)
    address, _ = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    headers = {"Authorization": f"Bearer {key}"}

    def decide(count):
        body = {"questions": ["Who wrote Emma?"] * count}
        return httpx.post(f"{address}/v1/decide", json=body, headers=headers, timeout=30)

    too_many = decide(7)  # counts as one request
    assert (too_many.status_code, too_many.json()["error"]["code"]) == (400, "rate")
    assert "at most 6 questions" in too_many.json()["error"]["message"]
    assert [decide(3).status_code, decide(3).status_code] == [200, 429]  # 4 requests, then 5
    models = [httpx.get(f"{address}/v1/models", headers=headers).status_code for _ in range(2)]
    assert models == [200, 429]
    assert httpx.get(f"{address}/health").status_code == 200


def test_readiness_shows_that_requests_cannot_be_counted(serve, tmp_path):
    keys, counters = tmp_path / "keys.json", tmp_path / "keys.json.used.db"
    free, slow = (add_key(keys, name, rate=rate) for name, rate in (("free", None), ("slow", 6)))
    counters.mkdir()
    address, _ = serve(gate="never", options={"keys": str(keys)})
    (problem,) = httpx.get(f"{address}/ready").json()["degraded"]  # before the first request
    assert "could not be counted" in problem
    assert [post(address, key).status_code for key in (free, slow)] == [200, 503]
    counters.rmdir()
    until(lambda: post(address, slow).status_code == 200)
    assert httpx.get(f"{address}/ready").json()["degraded"] == []


@pytest.mark.parametrize("jump", [3600.0, 86_400.0])
def test_a_clock_that_is_set_back_does_not_lock_a_key(tmp_path, jump):
    now = [1e9]
    limiter, key = (
        RateLimiter(tmp_path / "keys.json", clock=lambda: now[0]),
        ApiKey(name="app", hash="h", created=0.0, rate=2),
    )
    assert [admitted(limiter, key) for _ in range(3)] == [True, True, False]
    now[0] -= jump
    assert [admitted(limiter, key) for _ in range(3)] == [True, True, False]
    limiter.close()


@pytest.mark.parametrize("jump", [2, 10, 31, 59])
def test_a_rate_holds_when_the_clock_is_set_back_by_less_than_a_minute(tmp_path, jump):
    now, key = [1000.5], ApiKey(name="app", hash="h", created=0.0, rate=5)
    limiter = RateLimiter(tmp_path / "keys.json", clock=lambda: now[0])
    assert [admitted(limiter, key) for _ in range(7)] == [True] * 5 + [False] * 2
    now[0] -= jump
    assert not any(admitted(limiter, key) for _ in range(30))
    now[0] += 60
    assert not admitted(limiter, key)
    now[0] += 1
    assert [admitted(limiter, key) for _ in range(7)] == [True] * 5 + [False] * 2
    limiter.close()


def test_a_rate_holds_for_servers_whose_clocks_differ(tmp_path):
    key = ApiKey(name="app", hash="h", created=0.0, rate=5)
    ahead, behind = (RateLimiter(tmp_path / "keys.json", clock=lambda now=now: now) for now in (1005.0, 1000.0))
    assert [admitted(ahead, key) for _ in range(3)] == [True] * 3
    assert [admitted(behind, key) for _ in range(30)] == [True] * 2 + [False] * 28
    assert not admitted(ahead, key)
    ahead.close()
    behind.close()


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
    now[0] += 61
    assert [admitted(second, key), admitted(first, key), admitted(second, key)] == [True, True, False]
    first.close()
    second.close()


def test_any_minute_has_at_most_as_many_requests_as_the_rate(tmp_path):
    add_key(tmp_path / "keys.json", "app", rate=10)
    (key,), now = read_keys(tmp_path / "keys.json"), [1000.5]
    limiter = RateLimiter(tmp_path / "keys.json", clock=lambda: now[0])
    times = []
    while now[0] < 1200:
        if admitted(limiter, key):
            times.append(now[0])
        now[0] += 0.5 if len(times) % 10 else 1.5
    limiter.close()
    assert len(times) == 40
    assert all(late - early > 60 for early, late in zip(times, times[10:], strict=False))


def test_a_request_counts_until_it_is_more_than_a_minute_old(tmp_path):
    add_key(tmp_path / "keys.json", "app", rate=1)
    (key,), now = read_keys(tmp_path / "keys.json"), [1000.9]
    limiter = RateLimiter(tmp_path / "keys.json", clock=lambda: now[0])
    assert admitted(limiter, key)
    now[0] = 1060.1  # 59.2 seconds later, and the first request that may be rejected
    assert not admitted(limiter, key)
    now[0] = 1061.0
    assert admitted(limiter, key)
    limiter.close()


def test_workers_that_lose_the_file_of_the_counters_share_a_new_one(tmp_path):
    add_key(tmp_path / "keys.json", "app", rate=3)
    (key,) = read_keys(tmp_path / "keys.json")
    workers = [RateLimiter(tmp_path / "keys.json", clock=lambda: 1000.0) for _ in range(2)]
    assert [admitted(worker, key) for worker in workers] == [True, True]
    for path in tmp_path.glob("keys.json.used.db*"):
        path.unlink()
    assert [admitted(worker, key) for worker in workers * 3] == [True] * 3 + [False] * 3
    for worker in workers:
        worker.close()


def test_counters_of_an_earlier_version_are_upgraded(tmp_path):
    add_key(tmp_path / "keys.json", "app", rate=1)
    (key,) = read_keys(tmp_path / "keys.json")
    old = open_store(str(tmp_path / "keys.json.used.db"), (RATE_LIMIT_TABLES,), lock_timeout=1.0, is_durable=False)
    old.close()
    limiter = RateLimiter(tmp_path / "keys.json", clock=lambda: 1000.0)
    assert [admitted(limiter, key), admitted(limiter, key)] == [True, False]
    limiter.close()


def test_a_key_with_a_rate_is_rejected_if_the_counter_store_is_unavailable(serve, tmp_path):
    limited, free = (add_key(tmp_path / "keys.json", name, rate=rate) for name, rate in (("app", 9), ("free", None)))
    (tmp_path / "keys.json.used.db").mkdir()
    address, _ = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    replies = [post(address, key) for key in (limited, limited, free)]
    assert [reply.status_code for reply in replies] == [503, 503, 200]
    assert replies[0].json()["error"]["code"] == "rate_unavailable"
    (tmp_path / "keys.json.used.db").rmdir()
    until(lambda: post(address, limited).status_code == 200)


def test_the_rate_is_exact_for_a_burst_over_two_workers(tmp_path):
    add_key(tmp_path / "keys.json", "app", rate=5)
    (key,) = read_keys(tmp_path / "keys.json")
    workers = [RateLimiter(tmp_path / "keys.json", clock=lambda: 1000.0) for _ in range(2)]

    async def burst():
        calls = [worker.admit(key) for _ in range(300) for worker in workers]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(burst()) + asyncio.run(burst())
    assert sum(result is None for result in results) == 5
    assert {error.status for error in results if error is not None} == {429}
    for worker in workers:
        worker.close()


def test_the_rate_is_exact_for_concurrent_processes(tmp_path):
    add_key(tmp_path / "keys.json", "app", rate=7)
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        assert sum(pool.map(count_admitted, [tmp_path / "keys.json"] * 2)) == 7


def count_admitted(key_file):
    """Send 50 requests at once, and return how many were admitted."""
    (key,), limiter = read_keys(key_file), RateLimiter(key_file, clock=lambda: 1000.0)

    async def burst():
        return await asyncio.gather(*(limiter.admit(key) for _ in range(50)), return_exceptions=True)

    results = asyncio.run(burst())
    limiter.close()
    return sum(result is None for result in results)


def test_token_budgets_are_gone(tmp_path):
    assert run(["keys", "add", "app", "--budget", "1000", "--keys", str(tmp_path / "keys.json")]) == 2
    assert not (tmp_path / "keys.json").exists()
    assert "budget" not in ApiKey.model_fields
