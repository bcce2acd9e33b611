"""The server's own OpenAPI: complete, true, and nothing it allows makes the server fail (schemathesis)."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

from knowgate.server.openapi import ROUTES, build_openapi
from tests.server.test_beside import LengthReranker
from tests.server.test_chat import ask


def test_every_address_is_described(serve):
    _, app = serve(gate="always")
    served = {(method.lower(), route.path) for route in app.routes for method in route.methods if method != "HEAD"}
    files = {(method, path) for method, path in served if path.startswith("/dashboard/")}
    assert served - files == set(ROUTES)


def test_people_and_programs_are_told_without_a_key(serve, tmp_path):
    address, _ = serve(gate="always", options={"keys": str(tmp_path / "keys.json")})
    assert httpx.get(f"{address}/openapi.json").json()["openapi"] == "3.1.0"
    text = httpx.get(f"{address}/docs").text
    assert all(path in text for _, path in ROUTES)
    assert "http://" not in text
    assert "https://" not in text  # nothing comes from outside


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("upstream", [True, False])
def test_nothing_that_is_asked_makes_the_server_fail(serve, tmp_path, mode, upstream):
    def change(service):
        object.__setattr__(service.keeper.rag, "reranker", LengthReranker())

    options = {"decisions": str(tmp_path / "d.db")}
    address, _ = serve(upstream=upstream, gate="always", options=options, change=change)
    ask(address, model="knowgate")  # everything is there before time counts
    schema = schemathesis.openapi.from_dict(build_openapi())
    schema.config.update(base_url=address)
    cases = st.one_of(
        *(found.ok().as_strategy(generation_mode=mode) for found in schema.get_all_operations() if _takes(found, mode))
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


def _takes(found, mode):
    """Where there is nothing to get wrong, nothing wrong can be asked."""
    operation = found.ok()
    return mode is GenerationMode.POSITIVE or bool(list(operation.iter_parameters())) or bool(operation.body)
