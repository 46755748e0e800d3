"""docs/example_output.md shows what the commands print: ``pytest --update-golden`` rewrites it."""

import re
from pathlib import Path

import pytest

from tests.support.cli_runner import tracekit

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "example_output.md"
QUOTED = re.compile(r"^`tracekit ([^`]*sample_traces[^`]*)`.*?^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMANDS = [words for words, _ in QUOTED.findall(PAGE.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("words", COMMANDS, ids=[words.split()[0] for words in COMMANDS])
def test_what_is_quoted_is_what_is_printed(words: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    done = tracekit(*words.split(), cwd=ROOT, TRACEKIT_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = PAGE.read_text(encoding="utf-8")
    shown = dict(QUOTED.findall(page))[words]
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page.replace(shown, done.stdout), encoding="utf-8")
        shown = done.stdout
    assert done.stdout == shown


def test_both_a_verdict_and_a_comparison_are_quoted() -> None:
    assert [words.split()[0] for words in COMMANDS] == ["check", "compare"]
