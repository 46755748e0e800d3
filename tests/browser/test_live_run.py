"""A run that is being recorded while the dashboard is open: its files come one after the other, the pages follow."""

import contextlib
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser import recorded
from tests.browser.conftest import WAIT_MS, assert_clean
from tests.browser.grid import ROWS

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
RECORDED = Path(__file__).parents[2] / "sample_traces" / "faults" / "slow-rank"
NAME = "growing"
AN_HOUR_S = 3600
BEING_RECORDED = "is being recorded"


class Growing:
    """A recorded run, written again as the recorder writes: logs line by line, other files under another name first."""

    def __init__(self, folder):
        self.folder = folder
        self.steps = {log.name: log.read_text().splitlines(keepends=True) for log in RECORDED.glob("*.metrics.jsonl")}

    def take_steps(self, count):
        for name, lines in self.steps.items():
            with (self.folder / f"{name}.partial").open("a") as log:
                log.writelines(lines[:count])
            del lines[:count]

    def write(self, *names):
        for name in names:
            partial = self.folder / f"{name}.partial"
            shutil.copyfile(RECORDED / name, partial)
            partial.rename(self.folder / name)

    @contextlib.contextmanager
    def training(self):
        """Change the logs again and again, as a training does that goes on."""
        ended = threading.Event()

        def write():
            while not ended.wait(1.0):
                for partial in self.folder.glob("*.partial"):
                    os.utime(partial)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def end(self):
        """Put the logs in their place, and the whole recording an hour back."""
        self.write(*self.steps)
        for partial in self.folder.glob("*.partial"):
            partial.unlink()
        for file in self.folder.iterdir():
            os.utime(file, (time.time() - AN_HOUR_S,) * 2)


@pytest.fixture
def growing(server):
    folder = server.runs / NAME
    yield Growing(folder)
    shutil.rmtree(folder, ignore_errors=True)


def test_the_list_and_the_overview_follow_a_run_as_it_is_recorded(page, server, growing):
    page.goto(f"{server.url}/runs")
    expect(page.locator(ROWS).filter(has_text=recorded.GOOD)).to_have_count(1)
    growing.folder.mkdir()
    growing.take_steps(2)
    with growing.training():
        row = page.locator(ROWS).filter(has_text=NAME)
        expect(row).to_contain_text("no trace yet")
        expect(row).to_contain_text("live")
        says = page.locator("[data-testid=stCaptionContainer]").filter(has_text=f"{NAME} is at step")
        expect(says).to_have_text(re.compile(r"is at step 2\b"))
        growing.take_steps(2)
        expect(says).to_have_text(re.compile(r"is at step 4\b"))
        page.goto(f"{server.url}/?run={NAME}")
        expect(page.locator("[data-testid=stAlert]")).to_contain_text("wait for its first profiled window")
        growing.write("rank00000.pt.trace.json.gz")
        ranks = page.locator("[class*=st-key-breakdown_by_rank] .barlayer .point")
        expect(ranks).to_have_count(4)  # parts of one rank
        expect(page.locator("[data-testid=stMain]")).to_contain_text(BEING_RECORDED)
        straggler = page.locator(".tk-finding").filter(has_text=re.compile(r"RANK\d+"))
        expect(straggler).to_have_count(0)
        growing.write("rank00001.pt.trace.json.gz")
        expect(ranks).to_have_count(4 * 2)
        expect(straggler.first).to_be_visible()
        subtitle = page.locator(".tk-title span")
        expect(subtitle).not_to_contain_text("fsdp2")
        growing.write("run.json")
        expect(subtitle).to_contain_text("fsdp2")
    growing.end()
    expect(page.locator("[data-testid=stMain]")).not_to_contain_text(BEING_RECORDED)
    expect(ranks).to_have_count(4 * 2)
    assert_clean(page)
