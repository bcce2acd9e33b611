"""A server on this machine that says whatever a test wants it to, byte by byte, over raw sockets."""

from __future__ import annotations

import contextlib
import gzip
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

Reply = bytes | Callable[[], Iterable[bytes]]
HURRY = 0.01
SILENCE = 30.0  # seconds after which a client that neither reads nor writes is left alone; no test waits for it


class HostileServer:
    """Gives `reply`, whatever is asked, once per connection, and hangs up. Each connection has its own thread."""

    def __init__(self) -> None:
        self.reply: Reply = b""
        self.seen: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> HostileServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        threads = []
        while not self._stop.is_set():
            if select.select([self._socket], [], [], HURRY)[0]:
                connection, _ = self._socket.accept()
                threads.append(threading.Thread(target=self._answer, args=[connection], daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(SILENCE)
            self.seen.append(_request(connection))
            for piece in [self.reply] if isinstance(self.reply, bytes) else self.reply():
                if self._stop.is_set():
                    return
                connection.sendall(piece)


def _request(connection: socket.socket) -> bytes:
    """Head and body of what was asked."""
    data = b""
    while b"\r\n\r\n" not in data:
        got = connection.recv(65536)
        if not got:
            return data
        data += got
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def http(body: bytes | object, status: object = 200, **headers: str) -> bytes:
    """A reply as a server writes it; what is not bytes is sent as JSON.

    It announces that the server hangs up. Otherwise a client may send its next request on the same connection before it
    notices the end, and fails with another error than the one that is tested.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-length": str(len(content)), "connection": "close"}
    given |= {name.replace("_", "-"): text for name, text in headers.items()}
    lines = [f"HTTP/1.1 {status} Whatever", *(f"{name}: {text}" for name, text in given.items())]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + content


def dripping(data: bytes, pause: float = 0.02) -> Callable[[], Iterator[bytes]]:
    """A byte at a time."""

    def drops() -> Iterator[bytes]:
        for place in range(len(data)):
            yield data[place : place + 1]
            time.sleep(pause)

    return drops


def endless(head: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    """`head`, then `piece` for ever (for 30 s: whoever still listens then has failed)."""

    def flow() -> Iterator[bytes]:
        yield head
        stop = time.monotonic() + 30
        while time.monotonic() < stop:
            yield piece

    return flow


def bomb(layers: int = 1, megabytes: int = 100) -> bytes:
    """Zeros, compressed again and again."""
    data = bytes(megabytes << 20)
    for _ in range(layers):
        data = gzip.compress(data, 6)
    return data
