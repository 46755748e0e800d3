"""What CI is shown: valid by the schemas, one verdict in all formats, inert whatever the names in a trace."""

import dataclasses
import json
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from markdown_it import MarkdownIt

from tests.browser import recorded
from tests.support import cli_runner, sample_gates, sample_report
from tests.support.sample_gates import HOSTILE
from tests.support.wording import Wording
from tracekit.errors import ConfigError
from tracekit.ingest import loader
from tracekit.model import escaping
from tracekit.regression import baseline
from tracekit.regression.comparison import RunSamples
from tracekit.regression.gate import CheckResult, result_of_findings
from tracekit.regression.history import entry as history_entries
from tracekit.regression.history import store
from tracekit.report import baseline_json as saved_baselines
from tracekit.report import html, html_fragments
from tracekit.report import json as report_json
from tracekit.report.ci import codequality, comment, github, junit, sarif
from tracekit.report.ci.code_locations import Checkout
from tracekit.report.render import markdown
from tracekit.rules import engine
from tracekit.rules.rule import Finding, Severity

SCHEMAS = Path(__file__).parents[2] / "schemas"
GATES: dict[str, Callable[[], list[CheckResult]]] = {
    "one": lambda: [sample_gates.findings_only(bar=Severity.ERROR)],
    "clean": lambda: [sample_gates.findings_only(found=[])],
    "baseline": lambda: [sample_gates.with_baseline()],
    "several": lambda: [
        sample_gates.with_baseline(),
        sample_gates.findings_only("runs/other"),
        sample_gates.findings_only("runs/today"),
    ],
    "hostile": lambda: [sample_gates.hostile(), sample_gates.hostile()],
}
Golden = Callable[[str, str], None]
every = pytest.mark.parametrize("gates", GATES.values(), ids=list(GATES))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(sample_gates.repository(tmp_path, train="print(1)\n"))


# Names that are not text ----------------------------------------------------------------------------------------------


def test_a_folder_and_a_file_of_names_that_are_no_text_appear_in_every_format(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run\xff")
    recorded.write_run(folder, kernel="gemm")
    trace = folder / "rank00000.pt.trace.json.gz"
    trace.rename(folder / os.fsdecode(b"rank00000\xe9.pt.trace.json.gz"))
    report = engine.check(loader.load(str(folder), cache=False))
    gates = [result_of_findings(report, Severity.INFO)]
    log = json.loads(sarif.render(gates, Checkout(tmp_path)))
    located = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert located == "run%3F/rank00000%3F.pt.trace.json.gz"
    for render in (codequality.render, github.render, comment.render, junit.render):
        render(gates, Checkout(tmp_path)).encode()
    document = json.loads(report_json.render(report, report.run).encode())
    assert document["run"]["name"] == "run?"
    saved_baselines.render(baseline.of_reports([(report, report.run)])).encode()
    added = history_entries.history_entry(report_json.document(report, report.run), RunSamples.of(report.run))
    store.add(tmp_path / "h.duckdb", [added])
    assert store.read(tmp_path / "h.duckdb").runs["name"].to_list() == ["run?"]


# JUnit ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def junit_schema() -> Any:
    import xmlschema  # slow for each worker to import

    return xmlschema.XMLSchema(SCHEMAS / "junit-10.xsd")


@every
def test_junit_is_valid(gates: Callable[[], list[CheckResult]], checkout: Checkout, junit_schema: Any) -> None:
    junit_schema.validate(junit.render(gates(), checkout))


def test_junit_has_a_case_for_all_that_was_judged(checkout: Checkout) -> None:
    (suite,) = ET.fromstring(junit.render([sample_gates.with_baseline()], checkout))
    came = {f"{case.get('classname')}: {case.get('name')}": _came(case) for case in suite.iter("testcase")}
    assert came == {
        "today.rules: COMM001 exposed-communication": "failure",
        "today.rules: STREAM001 give-way": "skipped",
        "today.rules: HOST003 data-stall": "passed",
        "today.rules: MEM001 steady-device-allocation": "failure",
        "today.rules: DATA001 doubtful-trace": "passed",
        "today.rules: CKPT001 blocking-checkpoint": "skipped",
        "today.metrics: step_time_ns": "failure",
        "today.metrics: compute_ns": "passed",
        "today.metrics: exposed_communication_ns": "skipped",
        "today.metrics: idle_ns": "passed",
        "today.budgets: step_time": "failure",
        "today.budgets: idle": "passed",
        "today.budgets: tokens": "skipped",
    }
    counts = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["13", "4", "0", "4"]
    reasons = [each.get("message") for each in suite.iter("skipped")]
    assert reasons[:2] == ["it needs device lanes", "ignored: moves in May"]
    (regressed,) = (case.find("failure") for case in suite.iter("testcase") if case.get("name") == "step_time_ns")
    assert regressed is not None
    assert "3 ms more a step are exposed communication" in (regressed.text or "")


@pytest.mark.parametrize("said", [10**30, -5, 1.7e18, True, "2026-01-01T00:00:00"], ids=str)
def test_a_manifest_that_names_no_time_costs_the_timestamp_only(checkout: Checkout, said: object) -> None:
    def suite(gate: CheckResult) -> ET.Element:
        (made,) = ET.fromstring(junit.render([gate], checkout))
        return made

    plain = sample_gates.findings_only()
    assert suite(plain).get("timestamp") == "2026-09-21T14:13:20"
    run = sample_report.run(created_ns=said)
    report = dataclasses.replace(plain.report, run=run)
    assert suite(dataclasses.replace(plain, report=report)).get("timestamp") is None
    document = report_json.document(report, run)
    jsonschema.Draft202012Validator(json.loads(report_json.schema())).validate(document)
    assert history_entries.history_entry(document, report_json.comparison_side(document)).at_ns is None
    document["run"]["created_ns"] = said  # as another program may write it
    assert history_entries.history_entry(document, report_json.comparison_side(document)).at_ns is None


def _came(case: ET.Element) -> str:
    return next((tag for tag in ("failure", "skipped") if case.find(tag) is not None), "passed")


# SARIF ---------------------------------------------------------------------------------------------------------------


@every
def test_sarif_is_valid(gates: Callable[[], list[CheckResult]], checkout: Checkout) -> None:
    log = json.loads(sarif.render(gates(), checkout))
    for name in ("sarif-2.1.0.json", "sarif-github.json"):
        schema = json.loads((SCHEMAS / name).read_text())
        jsonschema.Draft7Validator(schema, format_checker=jsonschema.Draft7Validator.FORMAT_CHECKER).validate(log)
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    fingerprints = [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]
    assert len(set(fingerprints)) == len(fingerprints)


def test_sarif_has_levels_and_states_and_leaves_out_results_that_github_would_reopen(checkout: Checkout) -> None:
    (run,) = json.loads(sarif.render([sample_gates.with_baseline()], checkout))["runs"]
    shown = {result["ruleId"]: (result["level"], result["baselineState"]) for result in run["results"]}
    assert shown == {
        "COMM001": ("error", "updated"),
        "MEM001": ("warning", "new"),
        "REGRESSION": ("error", "new"),
        "BUDGET": ("note", "new"),  # the inconclusive one comes last
        "DATA001": ("note", "unchanged"),
    }
    assert [result["ruleId"] for result in run["results"]].count("BUDGET") == 2
    notes = " ".join(note["message"]["text"] for note in run["invocations"][0]["toolExecutionNotifications"])
    assert "CKPT001 is ignored: moves in May" in notes
    assert "HOST003 is in main and not in this run any more" in notes
    assert "STREAM001 could not judge" in notes


def test_a_finding_keeps_its_fingerprint_when_its_numbers_and_its_run_change(checkout: Checkout) -> None:
    def only(path: str, message: str) -> str:
        found = Finding("MEM001", Severity.WARNING, message, "", subject="layers.0")
        (run,) = json.loads(sarif.render([sample_gates.findings_only(path, found=[found])], checkout))["runs"]
        return str(run["results"][0]["partialFingerprints"]["primaryLocationLineHash"])

    assert only("runs/monday", "12 ms") == only("runs/tuesday", "13 ms")


def test_sarif_rules_carry_their_documentation(checkout: Checkout) -> None:
    (run,) = json.loads(sarif.render([sample_gates.findings_only()], checkout))["runs"]
    rule = next(each for each in run["tool"]["driver"]["rules"] if each["id"] == "HOST003")
    assert rule["name"] == "DataStall"
    assert rule["shortDescription"]["text"] == "A device that waits for the next batch."
    assert rule["fullDescription"]["text"].startswith("reports steps in which compute is idle")
    assert "**How to fix**" in rule["help"]["markdown"]


# Code Quality --------------------------------------------------------------------------------------------------------


@every
def test_code_quality_is_what_gitlab_asks_for(gates: Callable[[], list[CheckResult]], checkout: Checkout) -> None:
    entries = json.loads(codequality.render(gates(), checkout))
    for entry in entries:
        assert set(entry) == {"description", "check_name", "fingerprint", "severity", "location"}
        assert entry["severity"] in ("info", "minor", "major", "critical", "blocker")
        assert not entry["location"]["path"].startswith(("/", "./"))
        assert entry["location"]["lines"]["begin"] >= 1
    assert len({entry["fingerprint"] for entry in entries}) == len(entries)


# GitHub's annotations ------------------------------------------------------------------------------------------------


def _read(line: str) -> tuple[str, dict[str, str], str]:
    """Return a command as GitHub's runner reads it (ActionCommand.TryParseV2 in its source)."""
    assert line.startswith("::")
    command, _, message = line[2:].partition("::")
    level, _, fields = command.partition(" ")
    properties = dict(each.split("=", 1) for each in fields.split(","))
    unescaped = {key: _unescaped(value, {"%3A": ":", "%2C": ","}) for key, value in properties.items()}
    return level, unescaped, _unescaped(message, {})


def _unescaped(text: str, more: dict[str, str]) -> str:
    for code, letter in {"%0D": "\r", "%0A": "\n", **more, "%25": "%"}.items():
        text = text.replace(code, letter)
    return text


def test_annotations_say_what_fails_as_errors_and_what_is_known_as_notices(
    checkout: Checkout, wording: Wording
) -> None:
    first, *lines = github.render([sample_gates.with_baseline()], checkout).splitlines()
    assert first == "tracekit: today: Failed: 1 new finding, 1 worse finding, 1 metric worse than main, 1 budget broken"
    shown = [(level, properties["title"]) for level, properties, _ in map(_read, lines)]
    assert shown == [
        ("error", "tracekit: exposed-communication (COMM001)"),
        ("error", "tracekit: steady-device-allocation (MEM001)"),
        ("error", "tracekit: step time regressed"),
        ("error", "tracekit: budget step_time"),
        ("notice", "tracekit: doubtful-trace (DATA001)"),
        ("notice", "tracekit: budget tokens"),
    ]
    message = _read(lines[0])[2]
    wording(message)
    assert {properties["file"] for _, properties, _ in map(_read, lines)} == {"train.py"}


def test_no_name_can_make_a_command_or_a_property_of_its_own(checkout: Checkout) -> None:
    lines = github.render([sample_gates.hostile()], checkout).splitlines()
    assert lines[0].startswith("tracekit: ")
    for level, properties, message in map(_read, lines[1:]):
        assert level == "error"
        assert set(properties) <= {"file", "line", "title"}
        assert properties["file"] == "train.py"
        assert "\n" not in message


def _obeyed(printed: str) -> list[str]:
    """Return the lines in which GitHub's runner looks for a command (ActionCommand's TryParseV2 and TryParse)."""
    return [line for line in printed.splitlines() if line.lstrip().startswith("::") or "##[" in line]


def test_no_name_of_a_run_can_make_a_command_in_the_log(checkout: Checkout, tmp_path: Path) -> None:
    name = "run ##[stop-commands]x"
    first = github.render([sample_gates.with_baseline(f"runs/{name}")], checkout).splitlines()[0]
    assert first.startswith("tracekit: run ## [stop-commands]x: Failed: ")
    assert _obeyed(first) == []
    recorded.write_run(tmp_path / name, kernel="::add-mask::gemm")
    shown = {
        words: cli_runner.tracekit(*words, tmp_path / name, "--no-cache", GITHUB_ACTIONS="true")
        for words in (("check",), ("kernels",), ("check", "--format", "github"))
    }
    commands = {words: _obeyed(done.stdout + done.stderr) for words, done in shown.items()}
    annotations = commands.pop(("check", "--format", "github"))
    assert all(map(_read, annotations))
    assert annotations
    assert not any(commands.values())
    assert ": :add-mask::gemm" in shown["kernels",].stdout
    document = json.dumps({"name": name})
    assert _obeyed(escaping.without_commands(document)) == []
    assert json.loads(escaping.without_commands(document))["name"] == name


def test_github_is_given_no_more_than_it_shows(checkout: Checkout) -> None:
    many = [Finding("MEM001", Severity.WARNING, "churn", "", subject=f"layers.{number}") for number in range(25)]
    lines = github.render([sample_gates.findings_only(found=many)], checkout).splitlines()[1:]
    assert len(lines) == github.MAX_OF_LEVEL
    level, properties, message = _read(lines[-1])
    assert (level, properties["title"]) == ("warning", "tracekit: 16 more")
    assert message.count("steady-device-allocation") == 16


# HTML ----------------------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """The text of a page by the elements it is in, and the names of all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_begins_with_the_verdict_where_there_is_a_baseline() -> None:
    page = _Page()
    page.feed(
        html_fragments.gate_verdict(sample_gates.with_baseline())
        + html_fragments.gate_tables(sample_gates.with_baseline())
    )
    assert page.text[0] == "Failed: 1 new finding, 1 worse finding, 1 metric worse than main, 1 budget broken"
    assert "3 ms more a step are exposed communication." in page.text[2]
    assert page.text.count("worse, fails") == 2  # a metric and a finding
    assert "broken, fails" in page.text
    assert "fixed" in page.text
    gate = sample_gates.with_baseline()
    whole = html.render_several([(gate.report, gate.report.run)], [gate])
    assert whole.index("tk-gate failed") < whole.index('<div class="tk-verdict')
    assert (
        html_fragments.gate_verdict(sample_gates.findings_only())
        + html_fragments.gate_tables(sample_gates.findings_only())
        == ""
    )


def test_names_are_text_in_the_verdict_on_the_page() -> None:
    page = _Page()
    page.feed(html_fragments.gate_verdict(sample_gates.hostile()) + html_fragments.gate_tables(sample_gates.hostile()))
    assert set(page.tags) <= {"div", "b", "p", "h2", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}


# Markdown ------------------------------------------------------------------------------------------------------------


def test_the_comment_reads_as_its_golden_file(golden: Golden, checkout: Checkout) -> None:
    golden(
        "comment.md",
        comment.render(
            [sample_gates.with_baseline(), sample_gates.findings_only("runs/other")], checkout, key="nightly"
        ),
    )


class _Elements(HTMLParser):
    """What a browser would see: elements with their attributes, and text outside and inside of code."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.prose = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("br", "hr", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "code" not in self.open:
            self.prose += data


@every
def test_names_are_text_in_markdown(gates: Callable[[], list[CheckResult]], checkout: Checkout) -> None:
    shown = comment.render(gates(), checkout)
    page = _Elements()
    page.feed(MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(shown))
    page.close()
    assert page.open == []
    ours = {"h3", "p", "strong", "code", "pre", "table", "thead", "tbody", "tr", "th", "td", "br", "ul", "li", "sub"}
    assert set(page.tags) <= ours | {"details", "summary"}
    assert {name for name, _ in page.attributes} <= {"style", "class"}  # sides of columns, the language of a picture
    # What GitHub and GitLab look for in text outside of code: mentions, references, links, emoji.
    found = re.findall(r"(?:^|\W)[@#!~$]\w|\bGH-\d|://\w|\bwww\.\w|:\w+:", page.prose)
    assert found == []


def test_a_hostile_name_is_still_read_as_it_is(checkout: Checkout) -> None:
    page = _Elements()
    page.feed(MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(markdown.escape(HOSTILE)))
    shown = page.prose.replace("\u200b", "").strip()
    assert shown == re.sub(r"[\r\n]", " ", HOSTILE.replace("\x1b", "�").replace("\u202e", "�").replace("\x00", "�"))


@pytest.mark.parametrize("name", ["a|b", "a\\|b", "a\\", "|", "`|`", "a\n|b"])
@pytest.mark.parametrize("written", [markdown.escape, markdown.code], ids=["text", "code"])
def test_no_name_ends_a_cell(written: Callable[[str], str], name: str) -> None:
    shown = markdown.table((written(name), "x"), [(written(name), "y"), (written(name), "z")])
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", MarkdownIt("gfm-like", {"linkify": False}).render(shown))
    assert cells[1::2] == ["x", "y", "z"]


@pytest.mark.parametrize("text", ["- a", "1. a", "# a", "+ a", "---", "=== "])
def test_no_name_begins_a_list_or_a_heading(text: str) -> None:
    page = _Elements()
    page.feed(MarkdownIt("gfm-like", {"linkify": False}).render(f"before\n{markdown.escape(text)}"))
    assert page.tags == ["p"]
    assert markdown.escape("+8.1%") == "+8.1%"


@pytest.mark.parametrize("runs", [1, 10, 400])
def test_a_comment_never_exceeds_what_github_takes(runs: int, checkout: Checkout) -> None:
    long = [
        Finding("MEM001", Severity.WARNING, "ü" * 3000, "…" * 3000, subject=f"layers.{number}") for number in range(60)
    ]
    passing = sample_gates.findings_only("runs/passes", found=long)
    failing = sample_gates.findings_only("runs/fails", found=long, bar=Severity.WARNING)
    shown = comment.render([*[passing] * (runs - 1), failing], checkout)
    assert len(shown.encode()) <= comment.MAX_BYTES
    assert shown.startswith("<!-- tracekit:check -->\n### ❌ Failed: 60 findings")
    assert runs == 1 or shown.index("`fails`") < shown.index("`passes (1)`")  # what fails comes first
    assert shown.count("<details>") == shown.count("</details>") >= 1
    assert shown.rstrip().endswith("</sub>")
    assert ("more runs, 0 of which fail" in shown) == (runs == 400)


@pytest.mark.parametrize("key", ["", "a b", "-->", "a--b", "<", "k" * 101, "ä"])
def test_a_comment_has_a_name_that_hides(key: str, wording: Wording) -> None:
    with wording.raises(ConfigError):
        comment.marker(key)


# The picture ---------------------------------------------------------------------------------------------------------


def test_bars_are_as_long_as_the_times_they_show() -> None:
    comparison = sample_gates.with_baseline().comparison
    assert comparison is not None
    rows = [re.split(r" {2,}", line) for line in comment.before_and_now(comparison).splitlines()]
    step = [len(re.findall("█", " ".join(row))) for row in rows[:2]]
    assert step == [27, comment.WIDTH]  # 10 ms and 13 ms, give or take


def test_the_parts_of_a_bar_are_the_shares_of_the_step() -> None:
    first, *_, legend = comment.by_rank(sample_gates.findings_only().report.run).splitlines()
    assert [first.count(letter) for letter in "█▓░"] == [22, 7, 4]  # of 50 ms: 30, 10 and 5
    assert legend == "█ compute 60.0%  ▓ exposed communication 20.0%  ▒ copy 10.0%  ░ idle 10.0%"
