"""Several upstreams: who is asked, and what happens where one fails."""

from collections import Counter

import httpx
import pytest

import knowgate as kg
from knowgate.server.options import ServeOptions
from knowgate.server.upstream.client import UpstreamPool, WeightedAddress, parse_weighted_address
from tests.server.conftest import UNKNOWN
from tests.server.test_chat import ask, events
from tools.stub_upstream import running_stub


@pytest.fixture
def second():
    with running_stub() as stub:
        yield stub


def both(stub, second, **options):
    """The first one is always asked first."""
    return {"upstream": (f"{stub.url},weight=1000000", f"{second.url},weight=0"), **options}


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("gate", ["never", "logprob:mean"])
def test_where_one_fails_the_next_is_asked(serve, stub, second, status, streamed, gate):
    stub.status = status
    address, _ = serve(upstream=False, gate=gate, options=both(stub, second))
    reply = ask(address, stream=streamed)
    assert reply.status_code == 200
    assert (len(stub.bodies), len(second.bodies)) == (1, 1)


def test_what_the_client_did_wrong_is_asked_once(serve, stub, second):
    stub.status = 400
    address, _ = serve(upstream=False, gate="never", options=both(stub, second))
    assert ask(address).status_code == 400
    assert second.bodies == []


def test_one_that_is_not_there_is_left_alone_and_the_server_stays_ready(serve, stub, second):
    gone = {"upstream": ("http://127.0.0.1:9/v1,weight=1000000", f"{second.url},weight=0")}
    address, app = serve(upstream=False, gate="never", options=gone)
    assert [ask(address).status_code for _ in range(7)] == [200] * 7
    ready = httpx.get(f"{address}/ready")
    assert ready.status_code == 200
    assert ready.json()["breakers"] | {"gate": "", "retriever": ""} == {
        "gate": "",
        "retriever": "",
        "upstream": "open",
        "upstream 2": "closed",
    }
    assert app.state.service.breakers[2].failed == 5


def test_where_all_fail_the_last_ones_error_comes_back_unchanged(serve, stub, second):
    stub.status = second.status = 503
    address, _ = serve(upstream=False, gate="never", options=both(stub, second))
    reply = ask(address)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stub")


def test_a_stream_that_has_begun_is_not_begun_again(serve, stub, second):
    stub.breaks_off = True
    address, _ = serve(upstream=False, gate="never", options=both(stub, second))
    assert events(ask(address, UNKNOWN, stream=True))[-1]["error"]["code"] == "upstream_broke_off"
    assert second.bodies == []


def test_requests_are_shared_out_by_weight():
    drawn = iter([number / 400 for number in range(400) for _ in range(2)])
    several = UpstreamPool(
        [WeightedAddress("a", 3), WeightedAddress("b", 1)], passes_keys=False, draw=lambda: next(drawn)
    )
    first = Counter(several._order()[0].url for _ in range(400))
    assert first == {"a": 300, "b": 100}


def test_the_models_of_all_are_listed_once(serve, stub, second):
    address, _ = serve(upstream=False, gate="never", options=both(stub, second))
    names = [card["id"] for card in httpx.get(f"{address}/v1/models").json()["data"]]
    assert names.count("stub-llm") == 1


def test_a_weight_that_is_none_is_refused():
    assert parse_weighted_address("http://a/v1,weight=2.5") == WeightedAddress("http://a/v1", 2.5)
    with pytest.raises(kg.KnowgateError, match="the weight 'much'"):
        parse_weighted_address("http://a/v1,weight=much")


def test_upstreams_can_be_one_several_or_none():
    assert ServeOptions(upstream="http://a/v1/").upstream == ("http://a/v1",)
    assert ServeOptions(upstream=["http://a/v1/,weight=2", "http://b/v1"]).upstream == (
        "http://a/v1,weight=2",
        "http://b/v1",
    )
    assert ServeOptions(upstream=[]).upstream is None
