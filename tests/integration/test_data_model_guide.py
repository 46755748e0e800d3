"""docs/data_model.md shows what the commands print, and lists every data-quality issue."""

import re
import shlex
from pathlib import Path

from tests.support.cli_runner import tracekit
from tracekit.rules import data_quality

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data_model.md").read_text(encoding="utf-8")


def test_the_outputs_on_the_page_are_what_the_commands_print():
    blocks = re.findall(r"```\n\$ tracekit (.+)\n((?:.*\n)*?)```", PAGE)
    assert len(blocks) == 5
    for command, shown in blocks:
        done = tracekit(*shlex.split(command), cwd=ROOT)
        assert (done.stdout, done.stderr) == (shown, ""), command


def test_every_data_quality_issue_is_on_the_page_with_its_severity():
    rows = dict(re.findall(r"^\| ([a-z_]+) \| ((?:info|warning|error)[a-z, ]*) \|", PAGE, re.M))
    assert rows == {
        name: known.severity.label + (", grows" if known.can_be_error else "")
        for name, known in data_quality._KINDS.items()
    }
