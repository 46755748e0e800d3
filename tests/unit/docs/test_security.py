"""SECURITY.md: each promise names a test that exists."""

import ast
import re

from tests.support.cli_runner import ROOT

PROMISE = re.compile(r"^\| .+ \| `(?P<file>tests/\S+\.py)::(?P<test>\w+)` \|$", re.MULTILINE)


def test_each_promise_has_its_test():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    promises = [(match["file"], match["test"]) for match in PROMISE.finditer(text)]
    assert len(promises) == text.count("\n| ") - 1  # the heading of the table
    missing = [(file, test) for file, test in promises if test not in functions_in(file)]
    assert not missing


def functions_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
