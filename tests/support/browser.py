"""Controls a headless Chromium through its debugging pipe; needs no driver, package, port or network."""

import json
import os
import shutil
import subprocess
import tempfile
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "needs a browser: apt-get install chromium"
# Pages are drawn in software, so that measurements do not depend on a GPU.
FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-extensions",
    "--mute-audio",
)
FLAGS += ("--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update")


class PageError(AssertionError):
    """An exception that a page threw."""


class Browser:
    """A browser with one page."""

    def __init__(self) -> None:
        assert CHROMIUM
        self.folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_read, self.to = os.pipe()
        self.back, to_write = os.pipe()
        # The browser reads from file descriptor 3 and writes to 4.
        moved = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        command = ["bash", "-c", moved, "chromium", CHROMIUM, *FLAGS, f"--user-data-dir={self.folder.name}"]
        self.process = subprocess.Popen(
            [*command, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self.number, self.buffer, self.session = 0, b"", ""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.to)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.back)
        self.folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the debugging protocol and returns its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            result = self._next()
            if result.get("id") == self.number:
                if "error" in result:
                    raise PageError(f"{method}: {result['error']}")
                return result["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            data = os.read(self.back, 1 << 20)
            if not data:
                raise PageError("the browser ended")
            self.buffer += data
        text, _, self.buffer = self.buffer.partition(b"\0")
        result = json.loads(text)
        if result.get("method") == "Runtime.exceptionThrown":
            details = result["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        return result

    def run(self, script: str) -> Any:
        """Evaluates an expression in the page and returns its value; awaits promises."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise PageError(result["exceptionDetails"].get("exception", {}).get("description", "an error"))
        return result["result"].get("value")

    def open(self, address: str, width: int = 1440, height: int = 1000, dark: bool = False) -> None:
        """Loads a page in a window of the given size, and waits until it is drawn."""
        self.size(width, height, dark)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.run("new Promise((done) => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        self.frame()

    def size(self, width: int, height: int, dark: bool = False, scale: float = 1) -> None:
        """Sets the window's size, the preferred colour scheme and the scale."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def frame(self) -> None:
        """Waits until all requested changes are drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def key(self, name: str, text: str = "") -> None:
        """Presses and releases a key."""
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9, " ": 32, "Enter": 13}
        given = {"key": name, "code": "Space" if name == " " else name, "windowsVirtualKeyCode": codes.get(name, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text or (name if name == " " else ""), **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Sends a mouse event; kind: "Pressed", "Moved" or "Released"."""
        button = "none" if kind == "Moved" else "left"
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button=button, buttons=1, clickCount=1)

    def click(self, selector: str) -> None:
        x, y = self.middle(selector)
        self.mouse("Pressed", x, y)
        self.mouse("Released", x, y)

    def middle(self, selector: str) -> tuple[float, float]:
        """Scrolls an element into view and returns the position of its centre."""
        result = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', inline: 'center'}); "
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return result[0], result[1]
