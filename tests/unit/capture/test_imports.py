"""The recorder must run where only torch is installed, on Python 3.10 and later."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracekit.capture
from tracekit import conventions

HOME = Path(tracekit.capture.__file__).parent
FILES = sorted(path for path in HOME.rglob("*.py"))

LIST_NEW_MODULES = """
import json, sys
import torch, torch.distributed.checkpoint, torch.profiler
before = set(sys.modules)
from tracekit.capture import Recorder, auto_recorder, record_save, redact
print(json.dumps(sorted(set(sys.modules) - before)))
"""

LIST_MODULES = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tracekit.capture.launcher import command
print(json.dumps(sorted(sys.modules)))
"""


def test_the_recorder_imports_torch_the_standard_library_and_conventions() -> None:
    listing = subprocess.run([sys.executable, "-c", LIST_NEW_MODULES], check=True, capture_output=True, text=True)
    new = json.loads(listing.stdout)
    ours = {name for name in new if name.partition(".")[0] == "tracekit"}
    strangers = {name for name in set(new) - ours if name.partition(".")[0] not in {*sys.stdlib_module_names, "torch"}}
    assert not strangers
    shared = ("tracekit.capture", "tracekit.conventions")
    assert not {name for name in ours - {"tracekit"} if not name.startswith(shared)}


def test_what_starts_trainings_imports_the_standard_library() -> None:
    root = str(HOME.parents[1])
    bare = [sys.executable, "-I", "-S", "-c", LIST_MODULES, root]
    modules = json.loads(subprocess.run(bare, check=True, capture_output=True, text=True).stdout)
    known = {*sys.stdlib_module_names, "tracekit", "__main__"}
    assert not {name for name in modules if name.partition(".")[0] not in known}


def test_a_python_process_without_torch_imports_no_tracekit_module() -> None:
    inject = str(HOME / "launcher" / "inject")
    environment = {**os.environ, "PYTHONPATH": inject, conventions.RECORD_VARIABLE: "{}"}
    listed = "import sys; print('tracekit' in sys.modules, 'torch' in sys.modules, sys.path[1:2] == [sys.argv[1]])"
    done = subprocess.run(
        [sys.executable, "-c", listed, inject], check=True, capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == ["False", "False", "False"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_recorder_is_written_in_python_3_10(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not imported & {"Self", "StrEnum", "UTC", "chdir", "TaskGroup", "override", "batched"}
