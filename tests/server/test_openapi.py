"""The OpenAPI description is complete, and no request that it allows makes the server fail (schemathesis)."""

from importlib import metadata

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from starlette.routing import Route

from knowgate.core import VERSION
from knowgate.server.endpoints import ENDPOINTS, JSON_MEDIA_TYPE, build_openapi
from tests.server.test_chat import ask
from tests.server.test_endpoints import LengthReranker


def test_every_route_is_in_the_openapi_description(serve):
    _, app = serve(gate="always")
    routes = [route for route in app.routes if isinstance(route, Route)]
    served = {(method.lower(), route.path) for route in routes for method in route.methods if method != "HEAD"}
    assert served == {(endpoint.method.lower(), endpoint.path) for endpoint in ENDPOINTS}


def test_the_version_is_that_of_the_code(serve, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda package: "0.0.0")  # the metadata of an editable install can be old
    address, _ = serve(gate="never")
    assert build_openapi(ENDPOINTS)["info"]["version"] == VERSION
    assert httpx.get(f"{address}/v1/dashboard").json()["version"] == VERSION


def test_every_endpoint_describes_its_request_and_response():
    for endpoint in ENDPOINTS:
        is_json = JSON_MEDIA_TYPE in endpoint.media_types
        assert (endpoint.response is not None) == is_json, endpoint.path
        assert (endpoint.request is not None) == (endpoint.method == "POST"), endpoint.path
    for path, operations in build_openapi(ENDPOINTS)["paths"].items():
        assert all(operation["responses"]["200"]["content"] for operation in operations.values()), path


def test_the_media_types_are_those_that_are_described(serve):
    address, _ = serve(gate="always")
    for endpoint in ENDPOINTS:
        if endpoint.method == "GET" and endpoint.is_public:
            media_type = httpx.get(address + endpoint.path).headers["content-type"].partition(";")[0]
            assert media_type in endpoint.media_types, endpoint.path


def test_the_api_description_needs_no_key(serve, tmp_path):
    address, _ = serve(gate="always", options={"keys": str(tmp_path / "keys.json")})
    assert httpx.get(f"{address}/openapi.json").json()["openapi"] == "3.1.0"
    text = httpx.get(f"{address}/docs").text
    assert all(endpoint.path in text for endpoint in ENDPOINTS)
    assert "http://" not in text
    assert "https://" not in text  # nothing comes from outside


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("upstream", [True, False])
def test_no_generated_request_causes_a_server_error(serve, tmp_path, mode, upstream):
    def change(service):
        object.__setattr__(service.gate_service.rag, "reranker", LengthReranker())

    options = {"decisions": str(tmp_path / "d.db")}
    address, _ = serve(upstream=upstream, gate="always", options=options, change=change)
    ask(address, model="knowgate")  # everything is there before time counts
    schema = schemathesis.openapi.from_dict(build_openapi(ENDPOINTS))
    schema.config.update(base_url=address)
    cases = st.one_of(
        *(
            result.ok().as_strategy(generation_mode=mode)
            for result in schema.get_all_operations()
            if _takes(result, mode)
        )
    )

    @settings(
        max_examples=120,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def ask_anything(case):
        response = case.call(timeout=30)
        case.validate_response(response, checks=[not_a_server_error])

    ask_anything()


def _takes(result, mode):
    """Where there is nothing to get wrong, nothing wrong can be asked."""
    operation = result.ok()
    return mode is GenerationMode.POSITIVE or bool(list(operation.iter_parameters())) or bool(operation.body)
