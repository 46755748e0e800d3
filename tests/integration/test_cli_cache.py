"""The cache as a shell sees it."""

from pathlib import Path

import pytest

from tests.browser import recorded
from tests.support.cli_runner import tracekit


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "good"
    recorded.write_run(folder, kernel="gemm")
    return folder


@pytest.mark.parametrize("command", [("summary", 1), ("check", 1), ("compare", 2)], ids=lambda c: c[0])
def test_a_command_caches_parsed_traces_unless_disabled(command, run, tmp_path):
    name, runs = command
    own = {"TRACEKIT_CACHE_DIR": str(tmp_path)}
    without = tracekit(name, *[run] * runs, "--no-cache", **own)
    assert list(tmp_path.iterdir()) == []
    first = tracekit(name, *[run] * runs, **own)
    cached = {entry.name: entry.read_bytes() for entry in (tmp_path / "store").iterdir()}
    assert cached
    again = tracekit(name, *[run] * runs, **own)
    assert {entry.name: entry.read_bytes() for entry in (tmp_path / "store").iterdir()} == cached
    assert (without.stdout, without.returncode) == (first.stdout, first.returncode) == (again.stdout, again.returncode)
    assert without.stderr == first.stderr == again.stderr


def test_the_cache_command_shows_location_and_contents_and_clears_it(run, tmp_path):
    own = {"TRACEKIT_CACHE_DIR": str(tmp_path)}
    assert tracekit("cache", **own).stdout == f"0 B of 10 GiB in {tmp_path}/store\n"
    tracekit("summary", run, **own)
    assert tracekit("cache", "path", **own).stdout == f"{tmp_path}/store\n"
    shown = tracekit("cache", "size", **own).stdout
    assert " KiB of 10 GiB in " in shown
    assert f"{tmp_path}/store: traces " in shown
    assert "freed " in tracekit("cache", "clear", **own).stdout
    assert list((tmp_path / "store").glob("[!.]*")) == []


def test_an_unwritable_cache_only_causes_a_debug_message(run, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = tracekit("summary", run, TRACEKIT_CACHE_DIR=str(tmp_path / "file"))
    assert (done.returncode, done.stderr) == (0, "")
