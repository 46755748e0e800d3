"""Old names of commands and options: they do what today's command does, and no help shows them."""

import json
import shlex

import pytest
import typer.main

from tests.support.cli_runner import ROOT, tracekit
from tests.support.selection import others_in_accuracy
from tracekit.cli.application import COMMANDS, app
from tracekit.cli.renamed_commands import RENAMED, current_words

RUN = str(ROOT / "sample_traces" / "gpu" / "slow-rank")
SAME = [
    ("rules --format json", "explain --kind rule --format json"),
    ("schema ops", "explain --kind table ops"),
    ("ops RUN --top 2 --kind runtime", "kernels RUN --of host --top 2 --kind runtime"),
    ("critical-path RUN --top 2", "whatif RUN --critical-path --top 2"),
]


@pytest.mark.parametrize(("old", "new"), SAME, ids=[old for old, _ in SAME])
def test_an_old_name_does_what_the_new_command_does_and_says_its_name(old, new):
    before, after = (tracekit(*shlex.split(text.replace("RUN", RUN))) for text in (old, new))
    assert before.returncode == after.returncode == 0
    assert before.stdout == after.stdout
    notices = before.stderr.splitlines()
    name = old.split()[0]
    assert len(notices) == 1
    assert name in notices[0]
    assert " ".join(RENAMED[name].words) in notices[0]
    assert after.stderr == ""


def test_an_old_option_becomes_one_of_the_new_command(tmp_path):
    old, new = tmp_path / "old.folded", tmp_path / "new.folded"
    assert tracekit("flamegraph", RUN, "--by-rank", "--output", old).returncode == 0
    assert tracekit("kernels", RUN, "--by", "stack,rank", "--out", new).returncode == 0
    assert old.read_bytes() == new.read_bytes() == tracekit("kernels", RUN, "--by", "stack,rank").stdout.encode()


def test_every_old_name_has_a_command_of_today_and_is_in_no_help():
    group = typer.main.get_command(app)
    for name, command in RENAMED.items():
        assert command.words[0] in COMMANDS
        assert name not in COMMANDS
        parameters = group.get_command(None, command.words[0]).params
        assert {word for word in command.words if word.startswith("--")} <= {
            option for parameter in parameters for option in parameter.opts
        }
    listed = tracekit("--help").stdout.partition("Commands:")[2]
    assert not {line.split()[0] for line in listed.splitlines() if line.strip()} & RENAMED.keys()


def test_a_command_after_record_is_not_renamed():
    words = ["record", "--", "python", "train.py", "ops", "--by-rank"]
    assert current_words(words) == words
    assert current_words(["--debug", "schema"]) == ["--debug", "explain", "--kind", "table"]


@pytest.mark.parametrize(
    "command", others_in_accuracy(["check", "kernels", "whatif", "summary"], ["kernels", "summary"])
)
def test_out_and_output_are_one_option_and_the_help_shows_one(tmp_path, command):
    files = {spelling: tmp_path / spelling.strip("-") for spelling in ("--out", "--output", "-o")}
    for spelling, file in files.items():
        assert tracekit(command, RUN, "--format", "json", spelling, file).returncode in (0, 1)
    assert len({json.dumps(json.loads(file.read_text())) for file in files.values()}) == 1
    shown = tracekit(command, "--help").stdout
    assert "--out" in shown
    assert "--output" not in shown


def test_every_command_that_writes_a_result_calls_it_out():
    group = typer.main.get_command(app)
    for name in COMMANDS:
        command = group.get_command(None, name)
        commands = getattr(command, "commands", {name: command}).values()
        for parameter in (parameter for entry in commands for parameter in entry.params):
            if "-o" in parameter.opts or "--out" in parameter.opts:
                assert set(parameter.opts) == {"--out", "-o"}, name
