"""Measured tables in documents: what stands between a benchmark's marks is replaced."""

from collections.abc import Sequence
from pathlib import Path

_END = "<!-- end -->"


def put_between(path: Path, benchmark: str, lines: Sequence[str]) -> None:
    """Replace what stands in a file between ``<!-- measured by BENCHMARK -->`` and the next ``<!-- end -->``.

    Raises ValueError where the file does not have the marks.
    """
    begin = f"<!-- measured by {benchmark} -->"
    before, mark, rest = path.read_text(encoding="utf-8").partition(begin)
    _, end, after = rest.partition(_END)
    if not mark or not end:
        raise ValueError(f"{path}: has no {begin} followed by {_END}")
    text = "\n".join(lines)
    path.write_text(f"{before}{begin}\n{text}\n{_END}{after}", encoding="utf-8")
