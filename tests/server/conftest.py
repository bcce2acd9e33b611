"""Servers on loopback: in front of the fake model, and in front of a stub upstream."""

from contextlib import ExitStack

import pytest

import knowgate as kg
from knowgate.server.app import create_app
from knowgate.server.options import ServeOptions
from tests.support.invented import write_invented
from tests.support.processes import PATIENCE
from tools.local_server import run_server
from tools.stub_upstream import running_stub

KNOWN, UNKNOWN = "What is the capital of Bababaland?", "What is the capital of Babakoland?"


@pytest.fixture(autouse=True)
def isolate_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KNOWGATE_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("knowgate.server.learning.learner.LABEL_SECONDS", PATIENCE)  # however busy the machine is


@pytest.fixture
def invented(tmp_path):
    return write_invented(tmp_path / "in", 4)


@pytest.fixture
def stub():
    with running_stub() as stub:
        yield stub


@pytest.fixture
def serve(invented, stub):
    """Starts servers: serve(gate=..., options={...}) -> (address, app). upstream=False: the fake model answers."""
    with ExitStack() as stack:

        def start(*, upstream=True, options=None, change=None, **settings):
            given = {"model": invented.model, "docs": invented.docs, "k": 1, **settings}
            address = {"upstream": stub.url} if upstream else {}
            app = create_app(kg.PipelineOptions(**given), ServeOptions(**address, **(options or {})))
            stub.forget_requests()  # at start, a server may ask what its upstream returns
            if change is not None:
                change(app.state.service)
            return stack.enter_context(run_server(app)), app

        yield start
