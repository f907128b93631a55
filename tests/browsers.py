"""A real Chromium that tests look through, driven by the WebDriver protocol; `pythonpath` leads here."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1000,1200",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name of an element's id (W3C WebDriver, 11)


class Browser:
    """One window. Every look waits up to ten seconds for what it looks for."""

    def __init__(self, driver: str, folder: Path, *flags: str) -> None:
        self._driver = driver
        options = {"args": [*FLAGS, *flags, f"--user-data-dir={folder}"], "binary": shutil.which("chromium")}
        capabilities = {
            "alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        }
        session = self._call("POST", "/session", capabilities=capabilities)["sessionId"]
        self._base = f"/session/{session}"
        self._do("POST", "/timeouts", implicit=10_000)

    def _call(self, method: str, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self._driver + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def _do(self, method: str, path: str, **body: Any) -> Any:
        return self._call(method, self._base + path, **body)

    def open(self, url: str) -> None:
        self._do("POST", "/url", url=url)

    def find(self, xpath: str) -> str:
        """Return the id of the first element, once there is one."""
        found: str = self._do("POST", "/element", using="xpath", value=xpath)[_ELEMENT]
        return found

    def text(self, xpath: str) -> str:
        found: str = self._do("GET", f"/element/{self.find(xpath)}/text")
        return found

    def value(self, xpath: str) -> str:
        """Return what stands in a field."""
        found: str = self._do("GET", f"/element/{self.find(xpath)}/property/value")
        return found

    def click(self, xpath: str) -> None:
        self._do("POST", f"/element/{self.find(xpath)}/click")

    def write(self, xpath: str, text: str) -> None:
        """Replace the text of a field."""
        element = self.find(xpath)
        self._do("POST", f"/element/{element}/clear")
        self._do("POST", f"/element/{element}/value", text=text)

    def run(self, script: str) -> Any:
        return self._do("POST", "/execute/sync", script=script, args=[])

    def complaints(self) -> list[str]:
        """Return what the browser has logged: errors of scripts, refusals of the policy."""
        return [line["message"] for line in self._do("POST", "/se/log", type="browser")]

    def picture(self, file: Path) -> None:
        """Write a screenshot."""
        file.write_bytes(base64.b64decode(self._do("GET", "/screenshot")))

    def close(self) -> None:
        self._do("DELETE", "")


@contextmanager
def browser(folder: Path, *flags: str) -> Iterator[Browser]:
    """Start Chromium with a profile in `folder`; skip the test where it is not installed."""
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ports = (re.search(r"successfully on port (\d+)", line) for line in process.stdout)
            port = next(found[1] for found in ports if found)
            window = Browser(f"http://127.0.0.1:{port}", folder, *flags)
            yield window
            window.close()
        finally:
            process.terminate()
