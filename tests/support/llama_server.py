"""A real llama.cpp server on the embedded model, on loopback (`python -m tests.support.llama_server PORT`).
`PORT embeddings`: it embeds instead of chatting.

Its log goes to stderr. A process of its own: its library speaks to the terminal, and stays loaded.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.support.processes import child, until
from tests.support.served import free_port

NAME = "smollm"


@contextmanager
def running_llama(*, embeddings: bool = False) -> Iterator[str]:
    """Run the server and yield its URL, up to /v1."""
    port = free_port()
    kind = ["embeddings"] if embeddings else []
    command = [sys.executable, "-m", "tests.support.llama_server", str(port), *kind]
    quiet = subprocess.DEVNULL
    with child(command, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        until(lambda: _is_up(port), process)
        yield f"http://127.0.0.1:{port}/v1"


def _is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def serve(port: int, *, embeddings: bool = False) -> None:
    from xllamacpp import CommonParams, Server, llama_pooling_type

    from knowgate.models import embedded_weights as weights

    given = CommonParams()
    (given.model.path,) = (str(path) for path in weights.fetch_weights("smollm").glob("*.gguf"))
    given.n_ctx, given.n_parallel = 4096, 2
    # Several threads would wait for each other in a loop, which costs most where the cores are busy.
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
    given.hostnames, given.port, given.model_alias, given.use_jinja = ["127.0.0.1"], port, {NAME}, True
    if embeddings:
        given.embedding, given.pooling_type = True, llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    _server = Server(given)
    threading.Event().wait()


if __name__ == "__main__":
    serve(int(sys.argv[1]), embeddings="embeddings" in sys.argv[2:])
