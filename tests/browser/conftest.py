"""A real Chromium without a window, and the dashboard as a process of its own."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.browser import recorded

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1400,1000",
)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """Return a browser that logs its console and every request."""
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no Chromium with chromedriver on this machine (Debian: apt install chromium chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.set_page_load_timeout(60)
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium):
    """Return the browser on an empty page, with empty logs."""
    chromium.get("about:blank")
    chromium.get_log("browser"), chromium.get_log("performance")
    return chromium


@dataclass(frozen=True)
class Server:
    """The dashboard, opened on a folder of runs."""

    url: str
    port: int
    runs: Path


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    recorded.write_runs(runs)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = str(ROOT / "dashboard" / "app.py")
    command = [sys.executable, "-m", "streamlit", "run", app, "--server.port", str(port), "--", str(runs)]
    # Another folder, so that no configuration but the dashboard's own is found.
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    log = elsewhere / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=elsewhere, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        try:
            _wait_until_healthy(process, port, log)
            yield Server(f"http://127.0.0.1:{port}", port, runs)
        finally:
            process.terminate()
            process.wait(20)


def _wait_until_healthy(process, port, log):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the dashboard did not start:\n{log.read_text()}")


def errors_of(browser):
    """Return what the browser's console reported as an error since it was last asked."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def hosts_asked(browser):
    """Return the hosts that pages asked for anything since it was last asked ('' for files)."""
    asked = set()
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
        elif message["method"] == "Network.webSocketCreated":
            url = message["params"]["url"]
        else:
            continue
        scheme, _, rest = url.partition("://")
        if scheme in ("http", "https", "ws", "wss"):
            asked.add(rest.split("/")[0].rsplit(":", 1)[0])
        elif scheme == "file":
            asked.add("")
    return asked
