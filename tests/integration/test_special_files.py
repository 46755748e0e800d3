"""Pipes, devices and folders where a file is expected: refused at once, none is waited for or read without end."""

import os
from pathlib import Path

import pytest

from tests.support import kineto_files
from tracekit.cli import settings_file
from tracekit.conventions import regular_files
from tracekit.errors import ConfigError, TracekitError
from tracekit.ingest.decompression import Blocks
from tracekit.ingest.readers import logs
from tracekit.ingest.scrub import scrub


@pytest.fixture(params=["pipe", "device", "folder"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "special.json"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


def test_only_regular_files_are_opened(special: Path):
    with pytest.raises(OSError, match="not a regular file"):
        regular_files.open_to_read(special)


def test_a_link_to_a_regular_file_is_opened(tmp_path: Path):
    (tmp_path / "a").write_bytes("ä\r\nb\n".encode())
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert regular_files.read_text(tmp_path / "link") == "ä\nb\n"


def test_settings_traces_and_logs_are_not_waited_for(special: Path):
    with pytest.raises(ConfigError, match="not a regular file"):
        settings_file.parse(special)
    with pytest.raises(TracekitError):
        list(Blocks(str(special)))
    with pytest.raises(OSError, match="not a regular file"):
        logs._lines(str(special))


def test_scrub_leaves_special_files_out(tmp_path: Path, special: Path):
    run = tmp_path / "run"
    run.mkdir()
    kineto_files.write(run / "rank0.json", kineto_files.trace(0, steps=3))
    special.rename(run / "run.json")
    done = scrub(run, tmp_path / "out")
    assert [name for name, _ in done.left_out] == ["run.json"]
    assert done.files == ("rank0.json",)
