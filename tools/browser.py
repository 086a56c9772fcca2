"""Chromium without a window, by its DevTools protocol over a pipe: pages at the width of a phone as a phone
has it, in either colour scheme, with true wheels, keys and clicks. ``python -m tools.browser`` says whether
there is one.

Messages are JSON that ends with a zero byte, on the browser's file descriptors 3 and 4
(``--remote-debugging-pipe``): no port, no other package.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser")
MISSING = "this needs Chromium, and there is none here: apt-get install chromium"
PHONE, LAPTOP = 390, 1280  # widths in CSS pixels
HEIGHT = 900
SCHEMES = ("light", "dark")
ANSWER_S = 120.0  # until when an answer must be there, on a busy machine too
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
SETTLED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


class BrowserError(Exception):
    """The browser, or the script of a page, failed."""


def chromium() -> str | None:
    """The path of Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A Chromium that was started by ``browser``."""

    def __init__(self, process: subprocess.Popen[bytes], reads: int, writes: int) -> None:
        self._process, self._reads, self._writes = process, reads, writes
        self._numbers = itertools.count(1)
        self._pending = b""
        self._tabs: dict[str, Tab] = {}

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol. Raises BrowserError."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def wait_for(self, session: str, event: str) -> None:
        """Returns when a tab has said ``event``. Raises BrowserError."""
        deadline = time.monotonic() + ANSWER_S
        while event not in self._tabs[session].events:
            self._read(deadline, event)

    def _read(self, deadline: float, what: str) -> dict[str, Any]:
        """The next message; events are handed to their tab."""
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._reads], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self._reads, 1 << 20) if ready else b""
            if not data:
                raise BrowserError(f"no answer to {what} within {ANSWER_S:g} s" if not ready else "it ended")
            self._pending += data
        text, _, self._pending = self._pending.partition(b"\0")
        message = json.loads(text)
        if (tab := self._tabs.get(message.get("sessionId", ""))) and "method" in message:
            tab.note(message["method"], message["params"])
        return message

    @contextmanager
    def tab(self, width: int = LAPTOP, scheme: str = "light", height: int = HEIGHT) -> Iterator[Tab]:
        """An empty tab with a viewport of its own; a phone's, with touch and its rules for widths, below 600
        pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session, width, height)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        tab.call("Emulation.setEmulatedMedia", features=features)
        try:
            yield tab
        finally:
            self.call("Target.closeTarget", targetId=target)
            del self._tabs[session]


@dataclass
class Tab:
    """A page. ``problems`` are its errors, ``requests`` the addresses that it asked for, its own first."""

    browser: Browser
    session: str
    width: int
    height: int
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    events: set[str] = field(default_factory=set)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Keeps what an event tells."""
        self.events.add(method)
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, page: Path, query: str = "") -> None:
        """Loads a file, and returns when it is drawn."""
        self.events.discard("Page.loadEventFired")
        self.call("Page.navigate", url=page.resolve().as_uri() + query)
        self.browser.wait_for(self.session, "Page.loadEventFired")
        self.settle()

    def settle(self) -> None:
        """Returns when two more frames are drawn."""
        self.evaluate(SETTLED)

    def until(self, condition: str) -> None:
        """Returns when a condition holds. Raises BrowserError if it does not in time."""
        deadline = time.monotonic() + ANSWER_S
        while not self.evaluate(condition):
            if time.monotonic() > deadline:
                raise BrowserError(f"not within {ANSWER_S:g} s: {condition}")
            time.sleep(0.05)

    def evaluate(self, script: str) -> Any:
        """The value of an expression, or of its promise. Raises BrowserError for one that throws."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        is_phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)

    def place(self, selector: str, down: float = 0.5) -> tuple[float, float]:
        """A point in an element, which is scrolled to: half of its width from the left, and ``down`` of its
        height from above."""
        left, top, width, height = self.evaluate(
            "(e => { e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " const v = window.visualViewport;"  # mouse events are placed in what is seen of the page
            " return [b.left - v.offsetLeft, b.top - v.offsetTop, b.width, b.height];"
            f" }})(document.querySelector({selector!r}))"
        )
        return left + width / 2, top + height * down

    def click(self, selector: str) -> None:
        """Presses an element as a mouse does."""
        x, y = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def wheel(self, selector: str, delta: int, down: float = 0.5) -> None:
        """Turns the wheel over an element, towards its user for a ``delta`` above 0."""
        x, y = self.place(selector, down)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta)
        self.settle()

    def press(self, key: str) -> None:
        """Presses a key in the element that has the focus."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def type(self, text: str) -> None:
        """Writes into the element that has the focus."""
        self.call("Input.insertText", text=text)
        self.settle()

    def picture(self, target: Path, *, top: int = 0, height: int | None = None) -> None:
        """Saves a part of the page as PNG, as high as the viewport if no ``height`` is given."""
        clip = {"x": 0, "y": top, "width": self.width, "height": height or self.height, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium, which ends with the block. Raises BrowserError where there is none."""
    path = chromium()
    if path is None:
        raise BrowserError(MISSING)
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def at_three_and_four() -> None:
        high = [os.dup(fd) for fd in (theirs_in, theirs_out)]
        for fd, place in zip([os.dup(fd) for fd in high], (3, 4)):
            os.dup2(fd, place)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as user:
        process = subprocess.Popen(
            [path, *OPTIONS, f"--user-data-dir={user}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=at_three_and_four,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(process, ours_in, ours_out)
        finally:
            os.close(ours_out)  # it ends when nobody can tell it anything
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours_in)


if __name__ == "__main__":
    if (path := chromium()) is None:
        sys.exit(MISSING)
    print(path)
