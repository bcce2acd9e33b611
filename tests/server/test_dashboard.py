"""The dashboard: its data, and its page in a real browser."""

import json
import re

import httpx
import pytest
from aiohttp import web

from knowgate.evaluation.cost import compare_traffic_costs
from knowgate.evaluation.replay import Prices, Traffic
from knowgate.evaluation.server_log import read_server_log
from knowgate.server.auth.api_keys import add_key
from tests.server.conftest import KNOWN, UNKNOWN
from tests.server.test_arbitration import FixedArbiter, use_arbiter
from tests.server.test_chat import ask
from tests.server.test_learning import audit_options, get_arms, serve_with_alarm, wait_for_audits
from tests.support.browser import driven
from tests.support.chromium import needs_browser

HAS_CONTENT = "!document.getElementById('content').hidden"
HOSTILE = "<img src=x onerror=alert(1)> & <b>the capital of Bababaland</b>?"


@pytest.fixture
def page(tmp_path):
    with driven(tmp_path / "profile") as page:
        page.size(1280, 900)
        yield page


def log_options(tmp_path, **options):
    return {"decisions": str(tmp_path / "d.db"), "keep_questions": True, **options}


def open_dashboard(page, address):
    page.open(f"{address}/")
    page.wait(HAS_CONTENT)


# --- what it is made of ---------------------------------------------------------------------------


def test_the_page_loads_nothing_from_other_origins(serve):
    address, _ = serve(gate="never")
    for path in ("/", "/dashboard/main.js", "/dashboard/page.css"):
        reply = httpx.get(f"{address}{path}")
        assert reply.status_code == 200
        assert reply.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "http://" not in reply.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in reply.text
        assert "innerHTML" not in reply.text


def test_the_data_of_the_dashboard_needs_a_key_but_the_page_does_not(serve, tmp_path):
    key = add_key(tmp_path / "keys.json", "me", admin=True)
    address, _ = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    assert httpx.get(f"{address}/").status_code == 200
    assert httpx.get(f"{address}/v1/dashboard").status_code == 401
    assert httpx.get(f"{address}/v1/dashboard", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_savings_are_net_of_discarded_drafts(serve, stub, tmp_path):
    prices = {"price_retrieval": 1.0, "price_output_token": 0.5}
    address, _ = serve(gate="logprob:first", options=prices)
    stub.sure = -9.0
    ask(address)
    stub.sure = -0.01
    ask(address)
    ask(address)
    result = httpx.get(f"{address}/v1/dashboard").json()["figures"]
    arm = result["arms"]["all"]
    assert (arm["decided"], arm["retrieved"], arm["skipped"], result["requests"]) == (3, 1, 2, {"2xx": 3})
    assert arm["saved"]["retrievals"] == 2
    assert arm["saved"]["money"] == pytest.approx(2 * 1.0 - 4 * 0.5)  # two searches, less a draft of four tokens
    # A passage of 41 characters is about eleven tokens. The draft has four, after a prompt of five.
    assert arm["saved"]["tokens"] == pytest.approx(2 * 11 - 4 - 5)
    assert (sum(result["needs"]["retrieved"]), sum(result["needs"]["skipped"])) == (1, 2)
    assert result["stages"]["gate"]["n"] == 3


@pytest.mark.parametrize("count", [10**4200, 17 * 10**307, -(10**9), True, 1.5, "9"], ids=lambda count: str(count)[:9])
def test_impossible_token_counts_of_the_upstream_are_replaced_by_estimates(serve, stub, monkeypatch, count):
    async def answer(body):
        reply = json.loads((await plain(body)).text)
        return web.json_response({**reply, "usage": {"prompt_tokens": count, "completion_tokens": 4}})

    plain, stub.sure = stub._plain, -9.0
    monkeypatch.setattr(stub, "_plain", answer)
    address, _ = serve(gate="logprob:first")
    replies = [ask(address) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[0].json()["usage"] == {"prompt_tokens": count, "completion_tokens": 8}
    saved = httpx.get(f"{address}/v1/dashboard").json()["figures"]["arms"]["all"]["saved"]
    assert -100 < saved["tokens"] < 0  # two drafts of four tokens, and their short prompts


@pytest.mark.parametrize("chosen", [0.1, 0.9])
@pytest.mark.parametrize("gate", ["logprob:first", "always"])  # the draft is read by the gate, or by the arbiter alone
def test_a_draft_costs_the_same_whether_the_arbiter_sends_it_or_not(serve, stub, monkeypatch, chosen, gate):
    async def answer(body):
        reply = json.loads((await plain(body)).text)
        usage = {"prompt_tokens": 600 if "<passages>" in str(body) else 10, "completion_tokens": 4}
        return web.json_response({**reply, "usage": usage})

    plain, stub.sure = stub._plain, -9.0
    monkeypatch.setattr(stub, "_plain", answer)
    address, _ = serve(gate=gate, options={"price_token": 0.5}, change=use_arbiter(FixedArbiter(chosen)))
    reply = ask(address).json()
    assert reply["knowgate"]["choice"]["given"] == ("draft" if chosen > 0.5 else "passages")
    assert reply["usage"] == {"prompt_tokens": 610, "completion_tokens": 8}
    saved = httpx.get(f"{address}/v1/dashboard").json()["figures"]["arms"]["all"]["saved"]
    assert (saved["tokens"], saved["money"]) == (-14, -14 * 0.5)


@pytest.mark.parametrize(
    ("prices", "money", "is_unpriced"),
    [
        ({"price_search": 0.005}, 2 * 0.005, True),
        ({"price_search": 0.005, "price_llm_call": 0.002}, 2 * 0.005 - 0.002, False),
        ({"price_search": 0.005, "price_llm_call": 0.0}, 2 * 0.005, False),
        ({"price_search": 0.005, "price_token": 0.0}, 2 * 0.005, False),
        ({"price_llm_call": 0.002}, -0.002, False),
        ({}, None, False),
    ],
)
def test_the_second_call_after_a_draft_is_subtracted_from_the_money(serve, stub, prices, money, is_unpriced):
    address, _ = serve(gate="logprob:first", options=prices)
    for stub.sure in (-9.0, -0.01, -0.01):
        ask(address)
    arm = httpx.get(f"{address}/v1/dashboard").json()["figures"]["arms"]["all"]
    assert arm["extra_llm_calls"] == 1
    assert arm["saved"]["money"] == (None if money is None else pytest.approx(money))
    assert arm["has_unpriced_calls"] is is_unpriced


def test_the_dashboard_and_cost_give_the_same_money(serve, stub, tmp_path):
    address, _ = serve(gate="logprob:first", options=log_options(tmp_path, price_search=0.005, price_llm_call=0.002))
    for stub.sure in (-9.0, -0.01, -9.0, -0.01):
        ask(address)
    saved = httpx.get(f"{address}/v1/dashboard").json()["figures"]["arms"]["all"]["saved"]["money"]
    prices = Prices(search=0.005, llm_call=0.002)
    cost = compare_traffic_costs(Traffic(read_server_log(tmp_path / "d.db").events), 0.5, prices)
    assert saved == pytest.approx(4 * (cost.always.money(prices) - cost.gated.money(prices)))


def test_failed_replies_save_nothing(serve, stub, tmp_path):
    address, _ = serve(gate="never", options=log_options(tmp_path))
    ask(address)
    before = httpx.get(f"{address}/v1/dashboard").json()["figures"]
    stub.status = 500
    ids = [ask(address).headers["x-knowgate-id"] for _ in range(3)]
    after = httpx.get(f"{address}/v1/dashboard").json()["figures"]
    assert (after["requests"], before["arms"]["all"]["saved"]["retrievals"]) == ({"2xx": 1, "5xx": 3}, 1)
    assert [after[name] for name in ("arms", "needs", "stages")] == [
        before[name] for name in ("arms", "needs", "stages")
    ]
    assert httpx.get(f"{address}/v1/decisions/{ids[-1]}").json()["status"] == 500
    log = read_server_log(tmp_path / "d.db")
    assert (len(log.events), log.left_out) == (1, {"answered with an error": 3})


def test_replay_takes_no_costs_from_decisions_without_an_answer(serve, stub, tmp_path):
    address, _ = serve(gate="logprob:first", options=log_options(tmp_path))
    stub.sure = -9.0
    ask(address)
    for _ in range(3):
        id = httpx.post(f"{address}/v1/decide", json={"question": UNKNOWN}, timeout=30).json()["id"]
    httpx.get(f"{address}/v1/decisions/{id}")  # is answered after all decisions are written
    traffic = Traffic(read_server_log(tmp_path / "d.db").events)
    assert (len(traffic.events), traffic.count_known("cost_if_retrieved")) == (4, 1)


def test_a_draft_that_is_sent_because_nothing_was_found_is_no_extra_call(serve, stub, tmp_path):
    address, _ = serve(gate="logprob:first", options=log_options(tmp_path, price_search=0.005, price_llm_call=0.002))
    stub.sure = -9.0
    for text in (UNKNOWN, "Zyzzyva?"):
        id = ask(address, text).headers["x-knowgate-id"]
    assert len(stub.bodies) == 3
    assert httpx.get(f"{address}/v1/dashboard").json()["figures"]["arms"]["all"]["extra_llm_calls"] == 1
    httpx.get(f"{address}/v1/decisions/{id}")  # is answered after all decisions are written
    cost = compare_traffic_costs(Traffic(read_server_log(tmp_path / "d.db").events), 0.5, Prices(search=0.005))
    assert cost.gated.calls == 1.5


def test_a_draft_for_the_arbiter_alone_is_an_extra_call(serve, stub):
    options = {"price_search": 0.005, "price_llm_call": 0.002}
    address, _ = serve(gate="always", options=options, change=use_arbiter(FixedArbiter(0.1)))
    ask(address)
    arm = httpx.get(f"{address}/v1/dashboard").json()["figures"]["arms"]["all"]
    assert (arm["extra_llm_calls"], arm["saved"]["money"]) == (1, pytest.approx(-0.002))
    assert arm["saved"]["tokens"] < 0


def test_llm_and_gates_are_named_as_the_user_names_them(serve, stub, tmp_path):
    options = {"upstream_model": "my-llm", "gate_b": "logprob:mean", "decisions": str(tmp_path / "d.db"), "audit": 0.5}
    address, _ = serve(gate="logprob:first", options=options)
    data = httpx.get(f"{address}/v1/dashboard").json()
    assert (data["model"], data["gate"]) == ("my-llm", "logprob:first")
    assert [arm["gate"] for arm in data["learning"]["arms"].values()] == ["logprob:first", "logprob:mean"]


def test_an_llm_without_a_name_is_named_by_the_upstream(serve, stub):
    address, _ = serve(gate="never")
    assert httpx.get(f"{address}/v1/dashboard").json()["model"] == f"the LLM at {stub.url}"
    ask(address, model="knowgate")
    assert httpx.get(f"{address}/v1/dashboard").json()["model"] == "stub-llm"


def test_savings_are_unknown_before_the_first_retrieval(serve):
    address, _ = serve(gate="never")
    ask(address)
    saved = httpx.get(f"{address}/v1/dashboard").json()["figures"]["arms"]["all"]["saved"]
    assert saved == {"retrievals": 1, "tokens": None, "seconds": None, "money": None}


def test_a_constant_gate_is_described_in_words(serve, tmp_path):
    address, _ = serve(gate="never")
    data = httpx.get(f"{address}/v1/dashboard").json()
    assert data["constant"] == "the gate 'never' skips retrieval for every question"
    address, _ = serve(gate="logprob:first")
    assert httpx.get(f"{address}/v1/dashboard").json()["constant"] == ""


# --- in a browser ---------------------------------------------------------------------------------


@pytest.mark.process
@needs_browser
def test_the_page_shows_decisions_as_text_without_console_errors(serve, stub, page, tmp_path):
    address, _ = serve(gate="never", options={**audit_options(tmp_path), "keep_questions": True})
    ask(address, HOSTILE)
    wait_for_audits(address, 1)
    open_dashboard(page, address)
    page.wait("document.querySelector('#recent details')")
    text = page.text
    assert "What skipping costs" in text
    assert "Audits: following the gate changes 1 of 1 answers (100.0 %)" in text
    assert HOSTILE in text
    assert page.run("document.querySelectorAll('#recent img, #recent b').length") == 0
    assert "answers differ" in text
    assert page.console == []


@pytest.mark.process
@needs_browser
def test_the_page_says_in_words_if_the_gate_takes_more_and_if_calls_are_not_priced(serve, stub, page):
    address, _ = serve(gate="logprob:first", options={"price_search": 0.005})
    stub.sure, stub.slow = -9.0, 0.3
    ask(address)
    open_dashboard(page, address)
    page.wait("document.querySelectorAll('#tiles dd').length === 6")
    tiles = page.run("document.getElementById('tiles').textContent")
    assert re.search(r"[1-9]\d* ms moretime than always retrieving, because of drafts", tiles)
    assert "money saved; extra LLM calls are not priced (--price-llm-call)" in tiles
    assert page.run("document.querySelector('#tiles dd').offsetTop < document.querySelector('#tiles dt').offsetTop")
    tops = "[...document.querySelectorAll('#tiles div')].map((tile) => tile.offsetTop)"
    assert page.run(f"new Set({tops}).size") == 1  # all tiles in one row
    assert "Figures since" in page.text
    assert page.console == []


@pytest.mark.process
@needs_browser
def test_the_playground_can_be_used_by_keyboard_alone(serve, page, tmp_path):
    address, _ = serve(upstream=False, gate="prompt", options=log_options(tmp_path))
    open_dashboard(page, address)
    page.run("document.getElementById('question').focus()")
    page.type(UNKNOWN)
    page.press("Tab")
    page.press("Enter")
    page.wait("document.querySelectorAll('#answers .feedback').length === 2")
    page.wait("document.querySelector('.answer.chosen')")
    assert page.run("[...document.querySelectorAll('.text')].map((one) => one.textContent)") == [
        "Nowhere",
        "Babakostad",
    ]
    assert "The gate would retrieve" in page.text
    page.press("Tab")
    page.press("Tab")  # past 'good' of the first answer
    page.press(" ")
    page.wait("document.querySelector('#answers .feedback .note').textContent.startsWith('Thank you')")
    assert page.run("document.activeElement.getAttribute('aria-pressed')") == "true"
    recent = httpx.get(f"{address}/v1/dashboard").json()["recent"]
    report = [httpx.get(f"{address}/v1/decisions/{row['id']}").json() for row in recent]
    assert [(item["gate"], [said["rating"] for said in item["feedback"]]) for item in report if item["feedback"]] == [
        ("never", ["down"])
    ]
    assert page.console == []


@pytest.mark.process
@needs_browser
def test_the_page_asks_for_a_key_and_reports_a_wrong_one(serve, page, tmp_path):
    key = add_key(tmp_path / "keys.json", "me", admin=True)
    address, _ = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    page.open(f"{address}/")
    page.wait("!document.getElementById('login').hidden")
    assert page.run("document.activeElement.id") == "key"
    assert page.console == []
    page.type("kg-wrong")
    page.press("Enter")
    page.wait("document.getElementById('key-status').textContent")
    page.type(key)
    page.press("Enter")
    page.wait(HAS_CONTENT)


@pytest.mark.process
@needs_browser
def test_the_page_shows_an_alarm_and_clears_it(serve, stub, page, tmp_path):
    address = serve_with_alarm(serve, tmp_path)
    open_dashboard(page, address)
    page.wait("!document.getElementById('alarm').hidden")
    assert "Alarm for gate never: skipping changes more than 10 % of the answers" in page.text
    page.run("document.querySelector('#alarm button').click()")
    page.wait("document.getElementById('alarm').hidden")
    assert not get_arms(address)["a"]["loss"]["alarm"]


@pytest.mark.process
@needs_browser
def test_the_page_fits_a_phone_and_has_a_dark_mode(serve, page, tmp_path):
    address, _ = serve(upstream=False, gate="prompt", options=log_options(tmp_path))
    ask(address, KNOWN, model="knowgate")
    page.size(400, 800)
    open_dashboard(page, address)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    light = page.run("getComputedStyle(document.body).backgroundColor")
    page.size(400, 800, dark=True)
    assert page.run("getComputedStyle(document.body).backgroundColor") != light


@pytest.mark.process
@needs_browser
def test_decisions_can_be_filtered_and_stay_open_during_updates(serve, page, tmp_path):
    address, _ = serve(upstream=False, gate="prompt", options=log_options(tmp_path))
    for text in (KNOWN, UNKNOWN):
        ask(address, text, model="knowgate")
    open_dashboard(page, address)
    page.wait("document.querySelectorAll('#recent details').length === 2")
    page.run("document.querySelector('#recent details summary').click()")
    ask(address, KNOWN, model="knowgate")
    page.wait("document.querySelectorAll('#recent details').length === 3")
    assert page.run("[...document.querySelectorAll('#recent details')].map((one) => one.open)") == [False, True, False]
    page.run("f = document.getElementById('filter'); f.value = 'retrieved'; f.dispatchEvent(new Event('change'))")
    assert page.run("document.querySelectorAll('#recent details').length") == 1
    assert page.console == []


@pytest.mark.process
@needs_browser
def test_a_decision_of_a_rule_is_marked_and_shows_no_need(serve, page, tmp_path):
    address, _ = serve(upstream=False, gate="prompt", options=log_options(tmp_path))
    ask(address, "Thanks a lot!", model="knowgate")
    ask(address, UNKNOWN, model="knowgate")
    open_dashboard(page, address)
    page.wait("document.querySelectorAll('#recent details').length === 2")
    ruled, asked = (page.run(f"document.querySelectorAll('.need')[{place}].textContent") for place in (1, 0))
    assert ruled == "rule"
    assert float(asked) > 0


@pytest.mark.process
@needs_browser
def test_the_page_shows_neither_need_nor_threshold_of_a_constant_gate(serve, page, tmp_path):
    address, _ = serve(upstream=False, gate="never", options=log_options(tmp_path))
    ask(address, UNKNOWN, model="knowgate")
    open_dashboard(page, address)
    page.wait("document.querySelectorAll('#recent details').length === 1")
    assert page.run("document.querySelector('.need').textContent") == ""
    about = page.run("document.getElementById('about').textContent")
    assert "Gate: never (the gate 'never' skips retrieval for every question)" in about
    everything = page.run("document.getElementById('content').textContent")
    assert "it computes no need" in everything
    assert "threshold" not in everything
    assert page.console == []
