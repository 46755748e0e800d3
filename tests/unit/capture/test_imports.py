"""The recorder must run where only torch is installed, on Python 3.10 and later."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tracekit.capture

FILES = sorted(Path(tracekit.capture.__file__).parent.glob("*.py"))

LIST_NEW_MODULES = """
import json, sys
import torch, torch.distributed.checkpoint, torch.profiler
before = set(sys.modules)
import tracekit.capture
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_the_recorder_imports_torch_the_standard_library_and_conventions() -> None:
    listing = subprocess.run([sys.executable, "-c", LIST_NEW_MODULES], check=True, capture_output=True, text=True)
    new = json.loads(listing.stdout)
    ours = {name for name in new if name.partition(".")[0] == "tracekit"}
    strangers = {name for name in set(new) - ours if name.partition(".")[0] not in {*sys.stdlib_module_names, "torch"}}
    assert not strangers
    assert {name for name in ours if not name.startswith("tracekit.capture")} == {"tracekit", "tracekit.conventions"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_recorder_is_written_in_python_3_10(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not imported & {"Self", "StrEnum", "UTC", "chdir", "TaskGroup", "override", "batched"}
