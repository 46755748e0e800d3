"""The command line as a shell sees it: exit codes, stdout and stderr, in real processes where it is about those."""

import array
import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
import urllib.request
from pathlib import Path

import pytest

from tests.browser import recorded
from tests.support import cli_runner, loaded_runs, ports
from tests.support.cli_runner import ROOT, TIMEOUT_S, command, environment, in_a_process, only_line, tracekit
from tracekit import __version__

runs_loaded_once = loaded_runs.runs_loaded_once
pytestmark = pytest.mark.usefixtures("runs_loaded_once")
HEAVY = ("torch", "pandas", "plotly", "streamlit", "polars", "duckdb", "numpy", "rich")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two runs: in `good` 4 of 10 ms a step are exposed communication, in `better` 2."""
    folder = tmp_path_factory.mktemp("runs")
    recorded.write_run(folder / "good", kernel="gemm")
    recorded.write_run(folder / "better", kernel="gemm", communication_us=2000)
    return folder


def test_importing_tracekit_loads_nothing_heavy() -> None:
    code = f"import sys, tracekit; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout == "[]\n"


def test_version_prints_the_package_version() -> None:
    assert in_a_process("--version").stdout == f"tracekit {__version__}\n"


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (1, ["check", "RUN", "--fail-on", "info"]),
        (2, ["query", "RUN", "SELECT durr_ns FROM ops"]),
        (4, ["compare", "RUN", "OTHER"]),
    ],
    ids=str,
)
def test_a_subprocess_prints_and_exits_like_the_command_in_process(
    runs: Path, tmp_path: Path, code: int, arguments: list[str]
) -> None:
    recorded.write_run(tmp_path / "small", kernel="gemm", ranks=(0,))
    places = {"RUN": runs / "good", "OTHER": tmp_path / "small"}
    here, there = (run(*[places.get(each, each) for each in arguments]) for run in (tracekit, in_a_process))
    assert there.returncode == code
    assert (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr)


# Exit codes ----------------------------------------------------------------------------------------------------------


def test_findings_at_the_threshold_fail_the_check_and_are_listed(runs: Path) -> None:
    never = tracekit("check", runs / "good", "--fail-on", "never")
    assert (never.returncode, never.stderr) == (0, "")
    assert "\nWARNING  " in never.stdout
    info = tracekit("check", runs / "good", "--fail-on", "info")
    assert info.returncode == 1
    assert info.stdout == never.stdout
    assert "at or above info: " in info.stderr
    assert "COMM001" in info.stderr


def test_a_run_without_findings_exits_with_0(runs: Path) -> None:
    done = tracekit(
        "check",
        runs / "good",
        "--select",
        "COMM001",
        "--set",
        "COMM001.max_exposed_ratio=1",
        "--fail-on",
        "info",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "No problems found by 1 selected rule: COMM001\n" in done.stdout


def bad_inputs(folder: Path) -> dict[str, Path]:
    recorded.write_run(folder / "cut", kernel="gemm", ranks=(0,))
    whole = (folder / "cut" / "rank00000.pt.trace.json.gz").read_bytes()
    (folder / "cut" / "rank00000.pt.trace.json.gz").write_bytes(whole[:40])
    (folder / "nothing").mkdir()
    (folder / "empty.json").touch()
    (folder / "settings.json").write_text('{"learning_rate": 0.1}')
    (folder / "words.json").write_text("not JSON at all")
    names = ("absent", "nothing", "empty.json", "cut", "cut/rank00000.pt.trace.json.gz", "settings.json", "words.json")
    return {name: folder / name for name in names}


BAD = ("absent", "nothing", "empty.json", "cut", "cut/rank00000.pt.trace.json.gz", "settings.json", "words.json")


@pytest.mark.parametrize("name", BAD)
def test_unusable_input_exits_with_2_and_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    path = bad_inputs(tmp_path)[name]
    done = tracekit("check", path)
    assert done.returncode == 2
    assert str(path) in only_line(done)


def test_one_bad_rank_among_good_ones_is_a_finding_and_the_rest_is_analysed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    recorded.write_run(run, kernel="gemm", ranks=(0, 1, 2))
    path = run / "rank00001.pt.trace.json.gz"
    path.write_bytes(path.read_bytes()[:40])
    done = tracekit("check", run, "--format", "json", "--fail-on", "never")
    report = json.loads(done.stdout)
    assert {row["rank"] for row in report["summary"]} == {0, 2}
    assert [found["ranks"] for found in report["findings"] if found["code"].startswith("DATA")] == [[1]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["check"], "no run given"),
        (["check", ""], "the path of a run is empty: perhaps a variable that is not set"),
        (["check", "a" * 5000], "File name too long; check path, permissions"),
        (["check", "no*such*file"], "no*such*file: no trace file matches it"),
        (["check", "RUN/run.json"], "run.json: this is a run's manifest, not a trace; name a run's folder"),
        (["check", "RUN", "--select", "COMM01"], "no rule is called 'COMM01': did you mean COMM001?"),
        (["check", "RUN", "--select", "COMMM"], "no rule is called 'COMMM': did you mean COMM?"),
        (
            ["check", "RUN", "--set", "frobnicate.x=1"],
            "'frobnicate': tracekit explain lists them all",
        ),
        (["check", "RUN", "--set", "COMM001.max=1"], "unknown key 'max': "),
        (["check", "RUN", "--config", "absent.toml"], "absent.toml: cannot be read"),
        (
            ["check", "RUN", "--out", "no/such/folder/report"],
            "report: cannot be written: there is no folder no/such/folder",
        ),
        (["compare", "RUN", "RUN", "--fail-if", "step_time"], "expected METRIC>NUMBER"),
        (["compare", "RUN", "absent"], "absent"),
        (["explain", "COMM01"], "did you mean COMM001?"),
        (["dashboard", "absent"], "absent: there is no such file or folder; check the path"),
        (["dashboard", "RUN", "--host", "192.0.2.1"], "--host 192.0.2.1: is no address of this machine"),
        (["dashboard", "RUN", "--host", "no.such.host.invalid"], "--host no.such.host.invalid: is no address"),
        (["memory", "absent.pickle"], "absent.pickle: cannot be read: No such file or directory; check the path"),
        (["plan", "memory"], "--params or --model is needed, such as --model 405b"),
        (
            ["plan", "checkpoint", "--model", "405b", "--interval", "4h"],
            "or take it from a recorded run by --measured RUN",
        ),
        (["scrub", "RUN", "RUN"], "name another path"),
    ],
)
def test_unusable_options_exit_with_2_and_one_line(runs: Path, arguments: list[str], expected: str) -> None:
    done = tracekit(*[each.replace("RUN", str(runs / "good")) for each in arguments])
    assert done.returncode == 2
    assert expected in only_line(done)


def test_an_occupied_port_is_reported_with_a_free_one(runs: Path) -> None:
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = tracekit("dashboard", runs, "--no-browser", "--port", port)
    assert done.returncode == 2
    said = only_line(done)
    assert f"port {port} of 127.0.0.1 is in use" in said
    free = int(said.rpartition("--port ")[2])
    with socket.create_server(("127.0.0.1", free)):
        pass


def test_an_unknown_option_exits_with_2() -> None:
    done = tracekit("check", "--fale-on", "never")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--fail-on" in done.stderr


def test_runs_that_cannot_be_compared_exit_with_4_and_the_field(runs: Path, tmp_path: Path) -> None:
    recorded.write_run(tmp_path / "small", kernel="gemm", ranks=(0,))
    done = tracekit("compare", runs / "good", tmp_path / "small")
    assert done.returncode == 4
    assert "world_size differs: 2 in good, 1 in small" in only_line(done)
    assert tracekit("compare", runs / "good", tmp_path / "small", "--allow-different").returncode == 0


CRASHING_RULE = """
from dataclasses import dataclass
from typing import ClassVar
from tracekit.rules.rule import Rule

@dataclass(frozen=True)
class AlwaysCrashes(Rule):
    '''Crashes.'''
    code: ClassVar[str] = "CRASH001"

    def check(self, run):
        raise ZeroDivisionError("of all things")
        yield
"""


def test_a_crashing_rule_exits_with_3_and_shows_a_traceback_only_on_request(runs: Path, tmp_path: Path) -> None:
    # A rule from outside, as another distribution would install it.
    (tmp_path / "crashing.py").write_text(CRASHING_RULE)
    metadata = tmp_path / "crashing-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: crashing\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tracekit.rules]\ncrashing = crashing:AlwaysCrashes\n")
    path = f"{ROOT}{os.pathsep}{tmp_path}"

    check = ("check", runs / "good", "--select", "CRASH001")
    done = in_a_process(*check, PYTHONPATH=path, TRACEKIT_CRASH_REPORT="0")
    assert done.returncode == 3
    assert "CRASH001" in only_line(done)
    assert "of all things" in done.stderr
    assert "please report it" in done.stderr

    for done in (
        in_a_process("--debug", *check, PYTHONPATH=path, TRACEKIT_CRASH_REPORT="0"),
        in_a_process(*check, PYTHONPATH=path, TRACEKIT_CRASH_REPORT="0", TRACEKIT_DEBUG="1"),
    ):
        assert done.returncode == 3
        assert "ZeroDivisionError" in done.stderr
        assert "Traceback" in done.stderr


def test_a_closed_output_pipe_is_no_error(runs: Path) -> None:
    arguments = command("summary", runs / "good", "--by", "step", "--format", "json")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        arguments, env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def _waits_for_stdin(process: subprocess.Popen[str]) -> bool:
    """Return whether a process has read all that was written to it and sleeps, as it does in its next read."""
    assert process.stdin is not None
    unread = array.array("i", [0])
    fcntl.ioctl(process.stdin, termios.FIONREAD, unread)
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return unread[0] == 0 and state == "S"


def test_an_interrupt_is_quiet(runs: Path) -> None:
    # A query from stdin waits for its end; more of it than a pipe holds is written once the command reads.
    arguments = command("query", runs / "good", "-")
    with subprocess.Popen(
        arguments, env=environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write("-" * 100_000)
        process.stdin.flush()
        # Python handles a signal that arrives between two reads only when the second one ends.
        while not _waits_for_stdin(process):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        assert process.stderr is not None
        assert process.stderr.read() == ""


# Output and files -----------------------------------------------------------------------------------------------------


def test_the_nearest_settings_file_applies_and_options_override_it(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.tracekit]\nfail_on = "info"\nselect = ["COMM001"]\n')
    below = tmp_path / "below"
    below.mkdir()
    assert tracekit("check", runs / "good", cwd=below).returncode == 1
    assert tracekit("check", runs / "good", "--fail-on", "never", cwd=below).returncode == 0
    (tmp_path / "pyproject.toml").write_text('[tool.tracekit]\nfail_in = "info"\n')
    done = tracekit("check", runs / "good", cwd=below)
    assert done.returncode == 2
    assert only_line(done).endswith("unknown key 'fail_in': did you mean fail_on?")


def test_ignored_findings_do_not_fail_the_check_and_are_reported(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "tracekit.toml").write_text(
        'fail_on = "info"\nselect = ["COMM001"]\nignore = [{code = "COMM001", reason = "waiting for the new switch"}]\n'
    )
    done = tracekit("check", runs / "good", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ignored  COMM001 (waiting for the new switch)" in done.stdout


def test_output_goes_to_a_file_and_leaves_no_temporary_file(runs: Path, tmp_path: Path) -> None:
    done = tracekit("check", runs / "good", "--format", "json", "--fail-on", "never", "--out", tmp_path / "report.json")
    assert (done.stdout, done.stderr) == ("", "")
    assert json.loads((tmp_path / "report.json").read_text())["schema"] == "tracekit.report/2"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_several_runs_are_reported_together(runs: Path) -> None:
    done = tracekit("check", runs / "good", runs / "better", "--fail-on", "never", "--format", "json")
    assert [report["run"]["name"] for report in json.loads(done.stdout)["reports"]] == ["good", "better"]
    text = tracekit("check", runs / "good", runs / "better", "--fail-on", "never").stdout
    assert text.splitlines()[0].split() == ["finding", "good", "better"]


def test_an_html_report_contains_every_run(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = tracekit("check", runs / "good", runs / "better", "--fail-on", "never", "--format", "html", "-o", page)
    assert done.returncode == 0
    assert {">good<", ">better<"} <= {name for name in (">good<", ">better<") if name in page.read_text()}


def test_summary_is_by_rank_and_by_step(runs: Path) -> None:
    by_rank = json.loads(tracekit("summary", runs / "good", "--format", "json").stdout)
    by_step = json.loads(tracekit("summary", runs / "good", "--by", "step", "--format", "json").stdout)
    assert [(row["rank"], row["step"]) for row in by_rank] == [(0, None), (1, None)]
    assert [(row["rank"], row["step"]) for row in by_step] == [
        (rank, step) for rank in (0, 1) for step in recorded.STEPS
    ]
    assert tracekit("summary", runs / "good").stdout.count("\n") == 4


def test_a_budget_fails_only_when_exceeded_and_its_result_is_printed(runs: Path) -> None:
    done = tracekit("compare", runs / "good", runs / "better", "--fail-if", "step_time>3%", "--format", "json")
    changes = {change["metric"]: change for change in json.loads(done.stdout)["changes"]}
    assert done.returncode == 0
    assert done.stderr.startswith("tracekit: step_time>3%: ")
    assert changes["exposed_communication_ns"]["verdict"] == "better"


def test_a_budget_for_an_unmeasured_metric_exits_with_2(runs: Path) -> None:
    done = tracekit("compare", runs / "good", runs / "better", "--fail-if", "checkpoint_blocked>3%")
    assert done.returncode == 2
    assert "checkpoint_blocked>3%: not measured in both runs" in done.stderr


def test_a_saved_report_can_replace_its_run(runs: Path, tmp_path: Path) -> None:
    saved = tmp_path / "good.json"
    tracekit("check", runs / "good", "--format", "json", "--fail-on", "never", "--out", saved)
    of_report = tracekit("compare", saved, runs / "better", "--format", "markdown")
    of_run = tracekit("compare", runs / "good", runs / "better", "--format", "markdown")
    # A saved report has no calls, so that which of them changed the step is not known.
    before_calls, _, calls = of_run.stdout.partition("Calls ")
    assert of_report.stdout == before_calls + calls[calls.index("Metrics ") :] != ""


def test_rules_are_listed_and_explained() -> None:
    listed = json.loads(tracekit("explain", "--kind", "rule", "--format", "json").stdout)
    assert {"code", "name", "summary", "documentation", "thresholds"} <= set(listed[0])
    assert "COMM001" in tracekit("explain", "--kind", "rule").stdout
    explained = tracekit("explain", "exposed-communication").stdout
    for heading in ("What it does", "Why it costs", "How it is measured", "How to fix", "Blind spots", "Thresholds"):
        assert heading in explained


def test_the_schema_is_printed() -> None:
    assert json.loads(tracekit("check", "--print-schema").stdout)["$id"] == "tracekit.report/2"


def test_scrubbing_lists_what_it_removed_without_the_removed_text(runs: Path, tmp_path: Path) -> None:
    manifest = json.loads((runs / "good" / "run.json").read_text()) | {"host": "node-of-alice"}
    recorded.write_run(tmp_path / "run", kernel="gemm")
    (tmp_path / "run" / "run.json").write_text(json.dumps(manifest))
    done = tracekit("scrub", tmp_path / "run", tmp_path / "out")
    assert done.returncode == 0
    assert "1 host name in 1 place" in done.stdout
    assert "alice" not in done.stdout + done.stderr + (tmp_path / "out" / "run.json").read_text()
    before, after = (tracekit("summary", tmp_path / name, "--by", "step").stdout for name in ("run", "out"))
    assert before == after != ""


def process_on_a_terminal(*arguments: object, **variables: str) -> tuple[int, str]:
    """Return a process's exit code and all that it shows on a terminal, its stdout and stderr."""
    ours, theirs = pty.openpty()
    variables = environment(**{"TERM": "xterm"} | variables)
    with subprocess.Popen(command(*arguments), cwd="/", env=variables, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = cli_runner.read_all(ours)
        code = process.wait(TIMEOUT_S)
    os.close(ours)
    return code, shown.decode()


@pytest.mark.parametrize(("extra", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_printed_only_to_terminals_that_allow_them(extra: dict[str, str], *, coloured: bool) -> None:
    code, shown = process_on_a_terminal("explain", "--kind", "rule", **extra)
    assert code == 0
    assert ("\x1b[" in shown) is coloured
    assert "COMM001" in shown


# The dashboard's command ---------------------------------------------------------------------------------------------


def test_the_dashboard_is_served_on_this_machine_only(runs: Path) -> None:
    port = ports.free_port()
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    arguments = command("dashboard", runs, "--no-browser", "--port", port)
    process = subprocess.Popen(arguments, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert f"dashboard is at http://127.0.0.1:{port} " in process.stderr.readline().decode()
        assert answer_of(f"http://127.0.0.1:{port}/_stcore/health", process) == b"ok"
        assert listening_addresses(port) == {"0100007F"}  # 127.0.0.1, as the kernel writes it
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def answer_of(url: str, process: subprocess.Popen[bytes]) -> bytes:
    """Return the first answer of a server; fail where its process ends or five minutes pass."""
    until_s = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < until_s:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return bytes(answer.read())
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no answer from {url}; exit code of the server: {process.poll()}")


def listening_addresses(port: int) -> set[str]:
    """Return the local addresses that listen on a port, IPv4 and IPv6, in hexadecimal as /proc/net writes them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(address)
    return found


def test_without_streamlit_the_message_says_how_to_get_it(runs: Path) -> None:
    # Only Streamlit is hidden from Python; tracekit itself is unchanged.
    code = (
        "import importlib.util as util, sys; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'streamlit' else find(name, *rest)\n"
        f"sys.argv = ['tracekit', 'dashboard', {str(runs)!r}]\n"
        "from tracekit.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 2
    assert "pip install 'torch-tracekit[dashboard]'" in only_line(done)
