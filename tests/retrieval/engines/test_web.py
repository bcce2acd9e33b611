"""Web search on replies as the three engines document them; the network is never asked."""

import json

import httpx
import pytest

from knowgate.errors import BadInput, BadSetting, ServerError
from knowgate.gates import load_gate
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.retrieval import load_retriever
from knowgate.retrieval.engines import web as web_store
from knowgate.retrieval.engines import web_engines
from knowgate.retrieval.engines.web import SearchBudgetError, WebRetriever, convert_results, open_web, parse_web_options
from knowgate.retrieval.engines.web_engines import MAX_URL_CHARS, WebOptions, WebResult
from tests.integrations.conftest import TABLE, UNKNOWN

SEARXNG = {
    "query": "canteen",
    "number_of_results": 0,
    "results": [
        {
            "url": "https://bala.example/canteen",
            "title": "Canteen",
            "content": "Mira <b>runs</b> the canteen &amp; bar.",
            "engine": "duckduckgo",
            "score": 2.5,
            "category": "general",
        },
        {
            "url": "http://www.bala.example/canteen/?utm_source=x#top",
            "title": "Canteen again",
            "content": "The same page.",
            "score": 1.0,
        },
        {"url": "https://other.example/", "title": "Copy", "content": "Mira runs the canteen & bar.", "score": 0.5},
        {"url": "https://empty.example/", "title": "Empty", "content": ""},
    ],
    "answers": [],
    "suggestions": [],
    "unresponsive_engines": [],
}
TAVILY = {
    "query": "canteen",
    "follow_up_questions": None,
    "answer": None,
    "images": [],
    "results": [
        {
            "title": "Canteen",
            "url": "https://bala.example/c",
            "content": "Mira runs it.",
            "score": 0.91,
            "raw_content": None,
        }
    ],
    "response_time": 0.9,
}
BRAVE = {
    "type": "search",
    "query": {"original": "canteen", "more_results_available": True},
    "web": {
        "type": "search",
        "results": [
            {
                "title": "Canteen",
                "url": "https://bala.example/c",
                "description": "Mira <strong>runs</strong> it.",
                "extra_snippets": ["Since 1990."],
                "language": "en",
            }
        ],
    },
}


class Engine:
    """Replies with JSON, or with what is in line first; remembers the requests."""

    def __init__(self, reply, *first):
        self.reply, self.first, self.requests = reply, list(first), []

    def __call__(self, request):
        self.requests.append(request)
        return self.first.pop(0) if self.first else httpx.Response(200, json=self.reply)


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    monkeypatch.setenv("TAVILY_API_KEY", "tvly-secret")
    monkeypatch.setenv("BRAVE_API_KEY", "brave-secret")


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.retrieval.engines.web.cache_dir", lambda: tmp_path / "cache")

    def opened(name, handler, url="", **options):
        url = url or ("http://searx.test" if name == "searxng" else "")
        transport = httpx.MockTransport(handler)
        return WebRetriever(name, url, WebOptions(**options), transport)

    return opened


def test_searxng_gets_its_parameters_and_markup_becomes_text(web):
    engine = Engine(SEARXNG)
    (found,) = web("searxng", engine, lang="en", safe=2).search(["canteen"], 5)
    assert dict(engine.requests[0].url.params) == {
        "q": "canteen", "format": "json", "safesearch": "2", "language": "en"
    }  # fmt: skip
    assert [(item.id, item.title, item.text, item.score) for item in found] == [
        ("https://bala.example/canteen", "Canteen", "Mira runs the canteen & bar.", 2.5)
    ]


def test_tavily_gets_its_parameters(web):
    engine = Engine(TAVILY)
    (found,) = web("tavily", engine).search(["canteen"], 3)
    assert engine.requests[0].headers["Authorization"] == "Bearer tvly-secret"
    assert json.loads(engine.requests[0].content)["query"] == "canteen"
    assert (found[0].id, found[0].text, found[0].score) == ("https://bala.example/c", "Mira runs it.", 0.91)


def test_brave_gets_its_parameters(web):
    engine = Engine(BRAVE)
    (found,) = web("brave", engine, lang="en").search(["canteen"], 3)
    request = engine.requests[0]
    assert request.headers["X-Subscription-Token"] == "brave-secret"
    assert dict(request.url.params) == {"q": "canteen", "count": "10", "safesearch": "moderate", "search_lang": "en"}
    assert found[0].text == "Mira runs it. Since 1990."


def test_no_results_give_no_passages(web):
    assert web("brave", Engine({"type": "search"})).search(["x"], 3) == [[]]
    assert web("searxng", Engine({"results": []})).search(["x", "  ", ""], 3) == [[], [], []]


def test_long_queries_are_shortened_and_unusual_ones_are_sent(web):
    engine = Engine(SEARXNG)
    web("searxng", engine).search(["word " * 500, "\0a\ud800"], 3)
    assert sorted(len(request.url.params["q"]) for request in engine.requests) == [2, 249]


def test_searxng_gets_no_words_that_choose_an_engine_a_language_or_a_timeout(web):
    engine = Engine(SEARXNG)
    retriever = web("searxng", engine)
    for query in ("!!g zeppelin", "what !images :de is <3 it", "! !!:x a!b c:d", "!! :"):
        retriever.search([query], 3)
    assert [request.url.params["q"] for request in engine.requests] == [
        "g zeppelin",
        "what images de is 3 it",
        "x a!b c:d",
    ]


def test_the_same_query_is_sent_once(web):
    engine = Engine(SEARXNG)
    retriever = web("searxng", engine)
    retriever.search(["canteen", " canteen ", "canteen"], 3)
    retriever.search(["canteen"], 8)
    assert len(engine.requests) == 1


def test_a_cached_response_expires(web, monkeypatch):
    engine = Engine(SEARXNG)
    retriever = web("searxng", engine, days=1)
    retriever.search(["canteen"], 3)
    now = web_store.time.time()
    monkeypatch.setattr(web_store.time, "time", lambda: now + 86_399)
    retriever.search(["canteen"], 3)
    assert len(engine.requests) == 1
    monkeypatch.setattr(web_store.time, "time", lambda: now + 86_401)
    retriever.search(["canteen"], 3)
    assert len(engine.requests) == 2


def test_an_expired_response_is_used_with_a_warning_if_allowed(web, caplog):
    refusing = Engine(SEARXNG, httpx.Response(200, json=SEARXNG), *[httpx.Response(400)] * 4)
    web("searxng", refusing, days=1e-9).search(["canteen"], 3)
    with pytest.raises(ServerError, match="status 400"):
        web("searxng", refusing, days=1e-9).search(["canteen"], 3)
    (found,) = web("searxng", refusing, days=1e-9, stale=True).search(["canteen"], 3)
    assert found[0].title == "Canteen"
    assert "using an expired response" in caplog.text


def test_the_warning_of_a_failed_search_does_not_quote_the_response_and_is_written_once_a_second(web, caplog):
    quotes = httpx.Response(400, text="cannot process: has Anna the flu?")
    engine = Engine(SEARXNG, httpx.Response(200, json=SEARXNG), *[quotes] * 4)
    web("searxng", engine, days=1e-9).search(["has Anna the flu?"], 3)
    retriever = web("searxng", engine, days=1e-9, stale=True)
    for _ in range(3):
        retriever.search(["has Anna the flu?"], 3)
    assert caplog.text.count("using an expired response") == 1
    assert ("status 400" in caplog.text, "Anna" in caplog.text) == (True, False)


@pytest.mark.parametrize(("stale", "left"), [(False, 0), (True, 1)])
def test_expired_responses_are_deleted_unless_they_may_be_used(web, tmp_path, stale, left):
    retriever = web("searxng", Engine(SEARXNG), days=1e-9, stale=stale)
    retriever.search(["canteen"], 3)
    retriever.delete_expired()
    assert len(list((tmp_path / "cache" / "web" / "replies").glob("*.json"))) == left


def test_a_damaged_cache_file_is_requested_again(web, tmp_path):
    engine = Engine(SEARXNG)
    retriever = web("searxng", engine)
    retriever.search(["canteen"], 3)
    (file,) = (tmp_path / "cache" / "web" / "replies").glob("*.json")
    file.write_text('{"at": ', encoding="utf-8")
    assert retriever.search(["canteen"], 3)[0]
    assert len(engine.requests) == 2


def test_busy_engines_are_retried_and_then_an_error(web):
    busy = httpx.Response(429, headers={"Retry-After": "0"})
    engine = Engine(BRAVE, busy)
    assert web("brave", engine).search(["canteen"], 1)[0]
    assert len(engine.requests) == 2
    with pytest.raises(ServerError, match=r"status 429.*quota is used up"):
        web("brave", Engine(BRAVE, *[busy] * 3)).search(["other"], 1)


def test_a_used_up_plan_is_an_error(web):
    spent = httpx.Response(432, json={"detail": {"error": "This request exceeds your plan's set usage limit."}})
    with pytest.raises(ServerError, match=r"over its quota: .*usage limit"):
        web("tavily", Engine(TAVILY, spent)).search(["canteen"], 1)


def test_a_searxng_without_json_explains_how_to_allow_it(web):
    with pytest.raises(ServerError, match=r"formats: \[html, json\]"):
        web("searxng", Engine(SEARXNG, httpx.Response(403))).search(["canteen"], 1)


def test_keys_never_appear_in_errors(web):
    with pytest.raises(ServerError) as told:
        web("brave", Engine(BRAVE, httpx.Response(401, text="bad token brave-secret"))).search(["canteen"], 1)
    assert "brave-secret" not in str(told.value)


@pytest.mark.parametrize("name", ["TAVILY_API_KEY", "BRAVE_API_KEY"])
def test_a_missing_key_names_its_variable(name, monkeypatch):
    monkeypatch.delenv(name)
    with pytest.raises(BadSetting, match=f"Set the environment variable {name}"):
        open_web(name.split("_")[0].lower())


def test_the_budgets_per_minute_and_per_day_are_enforced(web):
    slow = web("searxng", Engine(SEARXNG), minute=2, deadline=0.2, days=0)
    slow.search(["a", "b"], 1)
    with pytest.raises(ServerError, match="2 searches per minute is used up"):
        slow.search(["c"], 1)
    with pytest.raises(ServerError, match="2 searches per day is used up"):
        web("searxng", Engine(SEARXNG), day=2, days=0).search(["d"], 1)


def test_each_attempt_of_a_search_counts_in_the_budget(web):
    failure = httpx.Response(500, headers={"Retry-After": "0"})
    engine = Engine(SEARXNG, *[failure] * 9)
    retriever = web("searxng", engine, day=5)
    for query in ("a", "b"):  # the second one has no attempt left after its second
        with pytest.raises(ServerError, match="status 500"):
            retriever.search([query], 1)
    assert len(engine.requests) == 5
    with pytest.raises(ServerError, match="5 searches per day is used up"):
        retriever.search(["c"], 1)


def test_a_recording_is_replayed_without_requests(web, tmp_path):
    recording = tmp_path / "recorded"
    web("searxng", Engine(SEARXNG), record=str(recording)).search([UNKNOWN], 3)
    retriever = load_retriever(f"web:replay@{recording}")
    rag = AdaptiveRAG(FakeModel(TABLE), load_gate("always"), retriever)
    answer = rag.answer(UNKNOWN)
    assert [item.id for item in answer.passages] == ["https://bala.example/canteen"]
    before = retriever.fingerprint
    with pytest.raises(BadInput, match=r"contains no search for 'who else\?'\. Record it"):
        retriever.search(["who else?"], 3)
    web("searxng", Engine(SEARXNG), record=str(recording)).search(["more"], 3)
    assert retriever.fingerprint != before


@pytest.mark.parametrize("reply", [[], {"results": 5}, {"results": None}, "text"])
def test_a_response_in_another_format_is_an_error(web, reply):
    with pytest.raises(ServerError, match="no list of results"):
        web("searxng", Engine(reply)).search(["x"], 1)


def test_malformed_results_are_left_out(web):
    odd = {"results": [5, {}, {"url": 5}, {"url": "http://a/", "content": 7, "title": None, "score": "high"}]}
    assert web("searxng", Engine(odd)).search(["x"], 3) == [[]]


def test_long_results_are_cut_before_their_markup_is_parsed(web, monkeypatch):
    lengths = []
    parse = web_engines.read_html
    monkeypatch.setattr(web_engines, "read_html", lambda markup: lengths.append(len(markup)) or parse(markup))
    long = {"url": "http://a/", "title": "<b>t</b>" * 10_000, "content": "<i>w</i>" * 100_000}
    engine = Engine({"results": [{**long, "url": "http://a/" + "x" * MAX_URL_CHARS}, long]})
    ((passage,),) = web("searxng", engine).search(["x"], 3)
    assert (passage.id, len(passage.title), lengths) == ("http://a/", 313, [2_500, 20_000])
    plain = Engine({"results": [{"url": "http://a/", "title": "t" * 9_000, "content": "w" * 9_000}]})
    ((passage,),) = web("searxng", plain).search(["y"], 3)
    assert (len(passage.title), len(passage.text)) == (500, 4_000)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("web:google", "Use one of: searxng, tavily, brave, replay"),
        ("web:searxng", "needs its address. Write web:searxng@https"),
        ("web:searxng@ftp://x", "not a valid address for the web search"),
        ("web:replay@nowhere", "there is no folder of recorded web searches"),
        ("web:tavily?colour=red", "unknown option 'colour'"),
        ("web:tavily?safe=9", "safe='9' is not allowed"),
        ("web:tavily?minute=0", "minute='0' is not allowed"),
        ("web:tavily?minute=x", "must be a whole number"),
        ("web:tavily?days=nan", "days"),
        ("web:tavily?stale=maybe", "must be true or false"),
        ("web:tavily?lang=../..", "the language must be a code"),
    ],
)
def test_an_invalid_spec_explains_what_is_allowed(spec, message):
    with pytest.raises(BadSetting, match=message):
        load_retriever(spec)


def test_options_are_parsed_by_their_type():
    assert parse_web_options("lang=en&day=5&days=0.5&stale=true") == WebOptions(lang="en", day=5, days=0.5, stale=True)


def test_duplicate_pages_and_texts_are_dropped():
    same = [
        WebResult("https://a/x", "t", "one"),
        WebResult("https://a/x/", "t", "two"),
        WebResult("https://b/", "t", " one "),
    ]
    assert [item.id for item in convert_results(same)] == ["https://a/x"]


def test_a_result_with_an_invalid_url_is_kept():
    assert [item.id for item in convert_results([WebResult("https://[a/x", "title", "text", None)])] == ["https://[a/x"]


@pytest.mark.parametrize("jump", [3600.0, 10 * 86_400.0])
def test_a_clock_that_is_set_back_does_not_raise_the_caps(tmp_path, monkeypatch, jump):
    now = web_store.time.time()
    budget = web_store.SearchBudget(tmp_path / "budget.json", per_minute=2, per_day=3)

    def search(at):
        monkeypatch.setattr(web_store.time, "time", lambda: at)
        try:
            budget.spend(timeout=0.0)
        except SearchBudgetError:
            return False
        return True

    assert [search(now) for _ in range(3)] == [True, True, False]
    back = now - jump
    assert [search(back), search(back + 59)] == [False, False]
    assert [search(back + 61), search(back + 130)] == [True, False]  # the third of the day is the last
    assert search(back + 86_500)
