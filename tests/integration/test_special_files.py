"""Pipes, devices and folders where a file is expected: refused at once, none is waited for or read without end."""

import ast
import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.support import kineto_files
from tests.support.cli_runner import ROOT
from tracekit.cli import settings_file
from tracekit.conventions import regular_files
from tracekit.errors import ConfigError, TracekitError
from tracekit.ingest import checkpoint_files
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


@pytest.mark.parametrize("name", [".metadata", "seal.json", "model.safetensors", "a.safetensors.index.json", "a.pt"])
def test_a_checkpoint_of_special_files_is_not_waited_for(tmp_path: Path, special: Path, name: str):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "b.pt").write_bytes(b"not a zip archive")
    special.rename(tmp_path / "run" / name)
    (checkpoint,) = checkpoint_files.verify(tmp_path / "run")
    is_folder = (tmp_path / "run" / name).is_dir()  # which may be a checkpoint itself
    problems = [(problem.file, problem.is_readable) for problem in checkpoint.problems]
    assert problems == ([] if is_folder else [(name, False)])


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000, "a/" * 5000])
def test_a_seal_with_a_name_that_no_file_has_is_damaged(tmp_path: Path, name: str):
    seal = {"files": {name: {"bytes": 1, "sha256": "0"}}}
    digest = hashlib.sha256(json.dumps(seal, sort_keys=True).encode()).hexdigest()
    (tmp_path / "seal.json").write_text(json.dumps({**seal, "sha256": digest}))
    (checkpoint,) = checkpoint_files.verify(tmp_path)
    assert [problem.file for problem in checkpoint.problems] == [name]


ROOMS = ("tracekit", "dashboard")
# Files that no input of others is: of the installation, of the kernel, in tracekit's own cache, or open for writing.
OPENERS = {
    "dashboard/components/__init__.py",
    "dashboard/server/frame.py",
    "dashboard/server/page_style.py",
    "dashboard/uploads.py",  # writes
    "tracekit/capture/atomic_files.py",  # writes
    "tracekit/capture/attempts.py",  # /proc
    "tracekit/capture/checkpoints/io_counters.py",  # the folder of a mount, for its number
    "tracekit/capture/hangs/threads.py",  # /proc
    "tracekit/capture/hangs/watch.py",  # writes; /proc
    "tracekit/capture/manifest.py",  # /proc, /sys
    "tracekit/capture/metrics.py",  # writes; /proc
    "tracekit/capture/profiler_session.py",  # its own pipe
    "tracekit/cli/output.py",  # writes
    "tracekit/cli/commands/verify_training.py",  # what a process of its own wrote, in a folder of its own
    "tracekit/conventions/plain_pickles.py",  # writes
    "tracekit/conventions/regular_files.py",
    "tracekit/ingest/archives.py",  # members; writes
    "tracekit/ingest/disk_cache.py",  # its own files, with a check of the owner
    "tracekit/ingest/remote.py",  # behind URLs; writes
    "tracekit/ingest/scrub/streams.py",  # writes
    "tracekit/model/escaping.py",
    "tracekit/model/plugins.py",
    "tracekit/tune/recording.py",  # writes
    "tracekit/plan/storage.py",  # files that it has just made, in a folder of its own
    "tracekit/regression/history/store.py",  # the folder of a history, for its lock
    "tracekit/report/baseline_json.py",
    "tracekit/report/explanations.py",
    "tracekit/report/json.py",
    "tracekit/rules/documents.py",
    "tracekit/rules/report_entry.py",  # the cache's own files
    "tracekit/sql/sandbox.py",  # /proc
    "tracekit/sql/table_documents.py",
}
OPENS = {"read_text", "read_bytes"}


def test_one_module_opens_what_others_wrote():
    names = set()
    for room in ROOMS:
        for path in ROOT.joinpath(room).rglob("*.py"):
            if any(map(opens_a_file, ast.walk(ast.parse(path.read_text())))):
                names.add(str(path.relative_to(ROOT)))
    assert names == OPENERS


def opens_a_file(node: ast.AST) -> bool:
    """Whether a node calls open, or a method that opens with an access mode, or reads a path as a whole."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "open"
    if not isinstance(node.func, ast.Attribute) or "regular_files" in ast.unparse(node.func.value):
        return False
    return node.func.attr in OPENS or (node.func.attr == "open" and "os." in ast.unparse(node.func)) or has_mode(node)


MODES = {"rb", "r", "wb", "w", "ab", "xb", "x"}


def has_mode(call: ast.Call) -> bool:
    values = [*call.args, *(word.value for word in call.keywords)]
    modes = {value.value for value in values if isinstance(value, ast.Constant)}
    is_text = any(word.arg == "encoding" for word in call.keywords)
    return ast.unparse(call.func).endswith(".open") and (is_text or bool(modes & MODES))
