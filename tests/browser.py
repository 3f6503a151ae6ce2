"""A headless Chromium for tests of pages, driven by its DevTools protocol over two pipes: no
package is needed. It takes real clicks and keys, and keeps what goes wrong on the page."""

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# without a sandbox it runs as root, too, as in containers
FLAGS = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe about:blank".split()


class Browser:
    def __init__(self):
        to_browser, self.write = os.pipe()
        self.read, from_browser = os.pipe()
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # the browser reads its file descriptor 3 and writes 4, which must not be the shell's own
        pipes = f"3<&{to_browser} 4>&{from_browser}"
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" {pipes}', "-", CHROMIUM, *FLAGS]
            + [f"--user-data-dir={self.profile.name}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.buffer = b""
        self.numbers = itertools.count(1)
        self.errors = []  # what the page or its console reported
        self.loaded = False
        self.session = {}
        pages = self.call("Target.getTargets")["targetInfos"]
        page = next(p["targetId"] for p in pages if p["type"] == "page")
        session = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self.session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.write)
        os.close(self.read)
        self.profile.cleanup()

    def call(self, method: str, **params) -> dict:
        """Call a method of the protocol -> its result."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params} | self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self.buffer:
            part = os.read(self.read, 1 << 16)
            assert part, "the browser has ended"
            self.buffer += part
        line, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        is_log = method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning")
        is_said = method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning")
        if method == "Runtime.exceptionThrown" or is_log or is_said:
            self.errors.append(json.dumps(params))
        self.loaded |= method == "Page.loadEventFired"
        return message

    def open(self, path, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Open a file in a window of this size, for people who like it light or dark."""
        self.errors.clear()
        self.loaded = False
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.loaded:
            self._next()

    def value(self, expression: str):
        """The value of JavaScript on the page."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def click(self, selector: str) -> None:
        """Click the middle of the first box of the element."""
        x, y = self.value(
            f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: "center"}}); const box = e.getClientRects()[0];
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            button = dict(button="left", clickCount=1)
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def key(self, name: str) -> None:
        codes = {"Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "Tab": 9}
        text = {"text": "\r"} if name == "Enter" else {}
        key = dict(key=name, code=name, windowsVirtualKeyCode=codes[name])
        self.call("Input.dispatchKeyEvent", type="keyDown", **key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def picture(self, path) -> None:
        """Write what the window shows to a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


def page_data(path) -> dict:
    """The data that stand in a page of `python -m lab trace`."""
    script = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text()
    )
    return json.loads(script[1])
