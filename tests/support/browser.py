"""A real browser that is driven: pages are opened, typed into, looked at; what they say to the console is kept.

Speaks the browser's own protocol over a socket; nothing has to be installed beside the browser.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.chromium import BROWSER, FLAGS

DRIVEN = [flag for flag in FLAGS if "virtual-time" not in flag]
KEYS = {"Enter": 13, "Tab": 9, " ": 32}


class Driven:
    """One page. console: what it complained of."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse, session: str):
        self.loop, self.socket, self.session = loop, socket, session
        self.console: list[str] = []
        self.number = 0

    def call(self, method: str, **options: Any) -> dict[str, Any]:
        return self.loop.run_until_complete(asyncio.wait_for(self._call(method, options), 60))

    async def _call(self, method: str, options: dict[str, Any]) -> dict[str, Any]:
        self.number += 1
        own = {"sessionId": self.session} if self.session else {}  # without one the browser itself is meant
        await self.socket.send_json({"id": self.number, "method": method, "params": options, **own})
        while True:
            said = await self.socket.receive_json()
            if said.get("id") == self.number:
                assert "error" not in said, said
                return dict(said["result"])
            self._hear(said)

    def _hear(self, said: dict[str, Any]) -> None:
        if said.get("method") in ("Runtime.consoleAPICalled", "Log.entryAdded", "Runtime.exceptionThrown"):
            self.console.append(json.dumps(said["params"])[:500])

    def open(self, address: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=address)
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0) -> None:
        """Until the script is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"never came true: {script}\n{self.text}"
            time.sleep(0.05)

    @property
    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def press(self, key: str, control: bool = False) -> None:
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 2 if control else 0}
        text = {"text": "\r"} if key == "Enter" and not control else {"text": key} if key == " " else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, place: Path) -> None:
        """All of the page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        place.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def driven(profile: Path) -> Iterator[Driven]:
    command = [str(BROWSER), *DRIVEN, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        address = next(line.split()[-1] for line in process.stderr if "DevTools listening" in line)
        loop = asyncio.new_event_loop()
        try:
            yield from _attached(loop, address)
        finally:
            loop.close()
            process.terminate()
            process.stderr.read()


def _attached(loop: asyncio.AbstractEventLoop, address: str) -> Iterator[Driven]:
    client = loop.run_until_complete(_client())
    try:
        socket = loop.run_until_complete(client.ws_connect(address, max_msg_size=0))
        root = Driven(loop, socket, "")
        target = root.call("Target.createTarget", url="about:blank")["targetId"]
        session = root.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Driven(loop, socket, session)
        page.number = root.number
        yield page
        loop.run_until_complete(socket.close())
    finally:
        loop.run_until_complete(client.close())


async def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()
