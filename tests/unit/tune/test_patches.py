"""Patches for review: what they add is one keyword per call, and the rest of the source stays as it is."""

import ast
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.tune import patches
from tracekit.tune.changes.change import CallKeyword

WORKERS = CallKeyword(("DataLoader",), "num_workers={value}, persistent_workers=True")
SOURCE = '''\
"""é"""
from torch.utils.data import DataLoader
a = DataLoader(data, batch_size=4)
b = torch.utils.data.DataLoader(
    data,
    batch_size=4,  # é
)
c = DataLoader()
d = DataLoader(data, num_workers=2)
e = DataLoader(data, **options)
é = DataLoader(DataLoader(data), "é")
'''


def applied(folder: Path, source: str, keyword: CallKeyword = WORKERS) -> str:
    """Source after the patch, as git applies it."""
    script = folder / "train.py"
    script.write_text(source, encoding="utf-8")
    text = patches.patch(["python", str(script)], keyword, "4")
    if text:
        done = subprocess.run(
            ["git", "apply", "--unsafe-paths", "--directory=/", "-"], input=text.encode(), cwd=folder, check=False
        )
        assert done.returncode == 0
    return script.read_text(encoding="utf-8")


def test_calls_without_the_keyword_get_it(tmp_path: Path) -> None:
    lines = applied(tmp_path, SOURCE).splitlines()
    added = "num_workers=4, persistent_workers=True"
    assert lines[2] == f"a = DataLoader(data, batch_size=4, {added})"
    assert lines[6] == f"{added})"
    assert lines[7] == f"c = DataLoader({added})"
    assert lines[8:10] == SOURCE.splitlines()[8:10]
    assert lines[10] == f'é = DataLoader(DataLoader(data, {added}), "é", {added})'


def test_a_source_without_such_a_call_has_no_patch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for source in ("x = 1\n", "def (:\n", "DataLoader(x, num_workers=1)\n", "\0", "(" * 5000):
        script.write_text(source)
        assert patches.patch([str(script)], WORKERS, "4") == ""
    script.write_bytes(b"\xff\xfe")
    assert patches.patch([str(script), "missing.py", str(tmp_path / "a\0.py")], WORKERS, "4") == ""


def test_special_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    (tmp_path / "folder.py").mkdir()
    assert patches.patch([str(path) for path in tmp_path.iterdir()], WORKERS, "4") == ""


arguments = st.lists(st.sampled_from(["x", "f(1)", '"é,)"', "[1, (2)]"]), max_size=3)
layout = st.sampled_from([", ", ",\n    ", " ,  # ) é\n  "])


@given(arguments, layout, st.booleans())
def test_a_patched_call_is_the_call_with_the_keyword(texts: list[str], separator: str, ends_in_comma: bool) -> None:
    call = f"DataLoader({separator.join(texts)}{',' if texts and ends_in_comma else ''}\n)\n"
    lines = call.splitlines(keepends=True)
    (node,) = patches._calls(ast.parse(call), CallKeyword(("DataLoader",), "n={value}"))
    patches._add_keyword(lines, node, "n=4")
    (before,), (after,) = (
        [
            inner
            for inner in ast.walk(ast.parse(text))
            if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "DataLoader"
        ]
        for text in (call, "".join(lines))
    )
    assert [ast.dump(argument) for argument in after.args] == [ast.dump(argument) for argument in before.args]
    assert [ast.unparse(keyword) for keyword in after.keywords] == ["n=4"]


@pytest.mark.parametrize("text", ["fused=True", "num_workers={value}, persistent_workers=True"])
def test_names_of_keywords(text: str) -> None:
    assert CallKeyword((), text).names == tuple(part.partition("=")[0] for part in text.split(", "))
