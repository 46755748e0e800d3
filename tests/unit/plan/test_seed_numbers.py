"""docs/seed_numbers.md: each command prints the number that the page states, and is as far from the document's."""

import json
import re
from collections.abc import Iterator

from tests.support.cli_runner import ROOT, tracekit

PAGE = ROOT / "docs" / "seed_numbers.md"
ROW = re.compile(r"^\| (?P<number>[^|]+) \| (?P<stated>\S+) \| `(?P<key>[\w.]+)` \| (?P<prints>\S+) \| "
                 r"(?P<difference>\S+)% \| (?P<why>[^|]*)\|$")  # fmt: skip
LARGEST_UNEXPLAINED = 0.5
"""Per cent: rounding of the documents' numbers."""


def test_each_command_prints_the_number_of_the_page() -> None:
    rows = list(page_rows())
    assert len(rows) > 35
    for command, row in rows:
        done = tracekit(*command.split(), "--format", "json")
        assert done.returncode == 0, (row["number"], done.stderr)
        value, stated = json.loads(done.stdout), float(row["stated"])
        for key in row["key"].split("."):
            value = value[key]
        assert f"{value:.4g}" == row["prints"], row["number"]
        assert f"{100 * (float(row['prints']) / stated - 1):+.1f}" == row["difference"], row["number"]
        assert row["why"].strip() or abs(float(row["difference"])) <= LARGEST_UNEXPLAINED, row["number"]


def page_rows() -> Iterator[tuple[str, re.Match[str]]]:
    """Yield the rows of the page's tables, each with the command above its table."""
    command = ""
    for line in PAGE.read_text(encoding="utf-8").replace(" \\\n", " ").splitlines():
        if line.startswith("    tracekit "):
            command = line.strip().removeprefix("tracekit ")
        elif row := ROW.match(line):
            yield command, row
