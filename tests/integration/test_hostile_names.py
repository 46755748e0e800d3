"""What commands print of a run with hostile names: to terminals, CI's log, spreadsheets, browsers and parsers."""

import csv
import gzip
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.cli_runner import ROOT, tracekit

HOSTILE = (
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "::error file=x::obey", "::set-output name=a::b", "##[error]obey",
    "##vso[task.setvariable]x", '=HYPERLINK("http://x","y")', "+cmd|' /C calc'!A0", "@SUM(1)", "-2+3|x",
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"}],"x":[{"', "a\nb", "a\r\n::error::c", "a\x00b",
    "\ud800", "\u202eabc", "\u2028x", "```\n# h1", "[x](javascript:alert(1))", "| a | b |", ";y 5\n;z 6",
    "x" * 5000 + "\x9b31m",
)  # fmt: skip
BEGINS_WITH_HOSTILE = ("kernel", "python_function", "gpu_memcpy")
"""Of these, nothing is known by how the name begins."""
NAMED_ARGUMENTS = ("Collective name", "Process Group Description", "kernel_file", "kernel_backend")
COMMANDS = {
    "check": ("text", "json", "markdown", "html", "github", "sarif", "junit", "codequality"),
    "summary": ("text", "json", "markdown", "html"),
    "kernels": ("text", "json", "markdown", "html", "csv"),
    "kernels --of host --by stack": ("text",),
    "whatif": ("text", "json", "markdown", "html"),
    "whatif --critical-path": ("text", "json", "html"),
    "memory": ("text", "json", "html"),
    "query": ("table", "json", "csv"),
}
CASES = [(command, form) for command, forms in COMMANDS.items() for form in forms]
UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
CI_COMMAND = re.compile(r"^\s*::[a-z]|##(vso)?\[", re.MULTILINE)
# Attributes and elements that a browser would run or load.
RUNS = ("onerror", "onload", "onclick", "srcdoc")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "::error::<b>\x1b[31m=1+1\u202e"
    folder.mkdir()
    written = {}
    for file in (ROOT / "sample_traces" / "ci" / "red").iterdir():
        if file.name.endswith(".json.gz"):
            trace = json.loads(gzip.decompress(file.read_bytes()))
            for event in trace["traceEvents"]:
                _spoil(event, written)
            (folder / file.name).write_bytes(gzip.compress(json.dumps(trace).encode()))
    manifest = json.loads((ROOT / "sample_traces" / "ci" / "red" / "run.json").read_text(encoding="utf-8"))
    manifest |= {"host": HOSTILE[0], "device_name": HOSTILE[10], "command": list(HOSTILE)}
    (folder / "run.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def _spoil(event: dict, written: dict[tuple[str, str], str]) -> None:
    """Add hostile text to all names of an event, the same to the same name."""
    args = event.get("args", {})
    if event.get("ph") == "M":
        if "name" in args:
            args["name"] = f"{args['name']} {HOSTILE[len(written) % len(HOSTILE)]}"
        return
    key = (event.get("cat", ""), event["name"])
    if key not in written:
        text = HOSTILE[len(written) % len(HOSTILE)]
        names = (text, event["name"]) if key[0] in BEGINS_WITH_HOSTILE else (event["name"], text)
        written[key] = " ".join(names)
    event["name"] = written[key]
    args.update({name: f"{args[name]} {HOSTILE[1]}" for name in NAMED_ARGUMENTS if name in args})


@pytest.mark.parametrize(("command", "form"), CASES)
def test_no_name_is_obeyed_split_or_lost(command: str, form: str, run: Path) -> None:
    name, *options = command.split()
    if name == "check":
        options += ["--fail-on", "never", "-v"]
    if name == "query":
        options = ["select distinct name from ops order by name"]
    if "stack" not in options:
        options += ["--format", form]
    done = tracekit(name, run, *options, GITHUB_ACTIONS="true", COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert not UNSEEN.search(done.stdout)
    if form != "github":  # its lines are the commands of tracekit
        assert not CI_COMMAND.search(done.stdout)
    READERS.get(form, lambda text: None)(done.stdout)


def test_each_name_is_in_the_rows_of_a_query(run: Path) -> None:
    names = json.loads(tracekit("query", run, "select distinct name from ops", "--format", "json").stdout)
    texts = [row["name"] for row in names]
    # Lone surrogates are no text: they are read as '�'.
    for text in (text for text in HOSTILE if text.isprintable()):
        assert any(text in name for name in texts), text


def _read_csv(text: str) -> None:
    rows = list(csv.reader(io.StringIO(text)))
    assert len({len(row) for row in rows}) == 1
    assert not [cell for row in rows for cell in row if re.match(r"[=@\t\r]|[+-](?!\d)", cell)]


def _read_github(text: str) -> None:
    for line in text.splitlines():
        assert re.match(r"::(error|warning|notice|group|endgroup)\b", line) or not line.startswith("::"), line


def _read_html(text: str) -> None:
    tags = list(_Tags.of(text))
    assert not [tag for tag, attributes in tags if any(name in RUNS for name in attributes)]
    assert "<script>alert" not in text
    assert not [tag for tag, attributes in tags if tag == "img" and attributes.get("src") == "x"]


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    @classmethod
    def of(cls, text: str) -> Iterator[tuple[str, dict[str, str | None]]]:
        parser = cls()
        parser.feed(text)
        yield from parser.tags


READERS = {
    "json": json.loads,
    "sarif": json.loads,
    "codequality": json.loads,
    "junit": ET.fromstring,
    "csv": _read_csv,
    "github": _read_github,
    "html": _read_html,
}
