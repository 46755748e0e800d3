"""Patches for review: keyword arguments added to calls in the scripts of a command. Nothing applies them."""

import ast
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tracekit.conventions import regular_files
from tracekit.tune.changes.change import CallKeyword, fill_template

_MAX_BYTES = 1 << 20


def patch(command: Sequence[str], keyword: CallKeyword, value: str) -> str:
    """Unified diff of the scripts that a command names, with the keyword in each call that lacks it; "" without one.

    Scripts that cannot be read or parsed have no patch.
    """
    scripts = dict.fromkeys(word for word in command if word.endswith(".py"))
    return "".join(_diff(script, keyword, value) for script in scripts)


def _diff(script: str, keyword: CallKeyword, value: str) -> str:
    path = Path(script)
    try:
        if path.stat().st_size > _MAX_BYTES:
            return ""
        source = regular_files.read_text(path)
        calls = [*_calls(ast.parse(source), keyword)]
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    lines = source.splitlines(keepends=True)
    for call in sorted(calls, key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0), reverse=True):
        _add_keyword(lines, call, fill_template(keyword.text, value))
    before = source.splitlines(keepends=True)
    name = script.lstrip("/")
    return "".join(difflib.unified_diff(before, lines, f"a/{name}", f"b/{name}"))


def _calls(tree: ast.Module, keyword: CallKeyword) -> Iterator[ast.Call]:
    """Calls of the functions by their last name, without those that have one of the keywords or pass on others'."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {argument.arg for argument in node.keywords}
        if name in keyword.functions and None not in given and not given.intersection(keyword.names):
            yield node


def _add_keyword(lines: list[str], call: ast.Call, text: str) -> None:
    """Write a keyword before the closing parenthesis of a call, whose columns count bytes."""
    row, column = (call.end_lineno or 1) - 1, (call.end_col_offset or 1) - 1
    line = lines[row].encode()
    before, after = line[:column].decode(), line[column:].decode()
    # Whether a comma is there already, the parser knows best: a comment may follow it.
    for separator in (", ", " " if before.endswith(",") else "") if call.args or call.keywords else ("",):
        lines[row] = before + separator + text + after
        if _is_source("".join(lines)):
            return


def _is_source(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
