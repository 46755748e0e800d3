"""README.md and docs/examples.md show what the commands print: ``pytest --update-golden`` rewrites it."""

import re
from pathlib import Path

import pytest

from tests.support import loaded_runs
from tests.support.cli_runner import tracekit

runs_loaded_once = loaded_runs.runs_loaded_once
pytestmark = pytest.mark.usefixtures("runs_loaded_once")
ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
EXAMPLES = ROOT / "docs" / "examples.md"
QUOTED = re.compile(r"^`tracekit ([^`]*sample_traces[^`]*)`.*?^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MAX_COLUMNS = 100


def quotations(page: Path) -> dict[str, str]:
    """Return the outputs that a page quotes, by the arguments of the command that prints them."""
    return dict(QUOTED.findall(page.read_text(encoding="utf-8")))


CASES = [pytest.param(page, line, id=f"{page.name}-{line}") for page in (README, EXAMPLES) for line in quotations(page)]


@pytest.mark.parametrize(("page", "command_line"), CASES)
def test_what_is_quoted_is_what_is_printed(
    page: Path, command_line: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    arguments, _, line_count = command_line.partition(" | head -")
    done = tracekit(*arguments.split(), cwd=ROOT, TRACEKIT_CACHE_DIR=str(tmp_path))
    assert done.returncode in (0, 1), done.stderr  # 1: it found an error
    printed_lines = done.stdout.splitlines(keepends=True)
    printed = "".join(printed_lines[: int(line_count)] if line_count else printed_lines)
    quoted = quotations(page)[command_line]
    if request.config.getoption("--update-golden"):
        page.write_text(page.read_text(encoding="utf-8").replace(quoted, printed), encoding="utf-8")
        quoted = printed
    assert printed == quoted


def test_the_readme_quotes_a_finding_and_the_examples_a_check_and_a_comparison() -> None:
    (readme_quotation,) = quotations(README).values()
    assert "; fixing it saves " in readme_quotation
    assert [line.split()[0] for line in quotations(EXAMPLES)] == ["check", "compare"]


@pytest.mark.parametrize("page", [README, EXAMPLES], ids=lambda page: page.name)
def test_quoted_lines_fit_a_page(page: Path) -> None:
    assert not [line for text in quotations(page).values() for line in text.splitlines() if len(line) > MAX_COLUMNS]
