"""Secrets of 40 kinds and more in a run: none is in what the recorder writes or what scrub copies; look-alikes stay."""

import gzip
import json
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from detect_secrets.core.scan import scan_line
from detect_secrets.settings import transient_settings

from tests.support.planted_secrets import HARMLESS, planted
from tracekit.capture import atomic_files
from tracekit.capture.manifest import redact
from tracekit.conventions import redaction
from tracekit.ingest.scrub import scrub

PLANTED = planted()
# Not those that report every hash and every random word, nor addresses: they have tests of their own.
SCANNERS = (
    "ArtifactoryDetector", "AWSKeyDetector", "AzureStorageKeyDetector", "BasicAuthDetector", "CloudantDetector",
    "DiscordBotTokenDetector", "GitHubTokenDetector", "GitLabTokenDetector", "JwtTokenDetector", "KeywordDetector",
    "MailchimpDetector", "NpmDetector", "OpenAIDetector", "PrivateKeyDetector", "PypiTokenDetector",
    "SendGridDetector", "SlackDetector", "SquareOAuthDetector", "StripeDetector", "TelegramBotTokenDetector",
    "TwilioKeyDetector",
)  # fmt: skip


def event(number: int, name: str, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": number, "dur": 1, "args": args}


def write_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"arguments": [plant.value for plant in PLANTED]}, indent=1))
    events = [event(number, f"step {json.dumps(plant.value)}") for number, plant in enumerate(PLANTED)]
    events += [event(number, "load", config=plant.value) for number, plant in enumerate(PLANTED)]
    trace = {"traceEvents": events, "environment": [plant.value for plant in PLANTED]}
    (folder / "rank00000.pt.trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    lines = [json.dumps({"checkpoint": "a", "stage": "write", "dur_ns": 1, "path": plant.value}) for plant in PLANTED]
    (folder / "rank00000.checkpoint.jsonl").write_text("\n".join(lines) + "\n")
    texts = {"segments": [], "frames": [{"env": plant.value} for plant in PLANTED]}
    (folder / "rank00000.memory.pickle").write_bytes(pickle.dumps(texts, protocol=4))
    return folder


def contents(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            raw = path.read_bytes()
            yield path.name, (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode(errors="replace")


def test_there_are_100_secrets_of_40_kinds_and_60_look_alikes():
    assert len(PLANTED) >= 100
    assert len({plant.kind for plant in PLANTED}) >= 40
    assert len(HARMLESS) >= 60


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.kind)
def test_the_recorder_keeps_no_secret(plant):
    assert plant.secret in json.dumps(plant.value)
    assert plant.secret not in json.dumps(redact(plant.value))


@pytest.mark.parametrize("value", HARMLESS, ids=lambda value: str(value)[:40])
def test_what_only_resembles_a_secret_stays(value):
    for shape in (value, [value], {"name": value}):
        assert redact(shape) == shape


@pytest.mark.parametrize(
    "arguments",
    [
        ["mysql", "-u", "root", "-ph4zelnut", "db"],
        ["srun", "/usr/bin/sshpass", "-p", "h4zelnut", "ssh", "node3"],
        ["redis-cli", "-a", "h4zelnut", "ping"],
        ["ssh-keygen", "-t", "ed25519", "-N", "h4zelnut", "-f", "key"],
        ["ldapsearch", "-D", "cn=bob", "-w", "h4zelnut", "-b", "dc=x"],
        ["7z", "x", "-ph4zelnut", "data.7z"],
        ["curl", "-ubob:h4zelnut", "https://host/file"],
        ["aws", "configure", "set", "aws_secret_access_key", "h4zelnut"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_password_among_the_arguments_of_a_command_is_replaced_and_nothing_else(arguments):
    assert redact(arguments) == [part.replace("h4zelnut", redaction.REDACTED) for part in arguments]
    assert redact({"other": ["mysql", 1], "n": arguments})["n"] == redact(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["rar", "a", "-p", "data.rar"],
        ["ssh-keygen", "-N", "", "-f", "key"],
        ["curl", "-u", "https://host/file"],
        ["wandb", "login", "--relogin"],
        ["ldapsearch", "-W", "-b", "dc=x"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_without_a_password_stays(arguments):
    assert redact(arguments) == arguments
    assert redact(" ".join(arguments)) == " ".join(arguments)


def test_a_token_that_a_login_takes_is_replaced():
    token = "067ff843d68f5d0eb5ad309aebaa2c8aba470a6e"
    assert redact(["wandb", "login", token]) == ["wandb", "login", redaction.REDACTED]
    assert redact(["python", "train.py", token]) == ["python", "train.py", token]  # as a commit


def test_tokens_by_the_form_of_their_issuer_are_replaced():
    tokens = ("sk.eyJ1Ijoic29tZWJvZHkiLCJhIjoiY2x4.Zx8kqW2LmN4rT6yB", "e2b_3f9c17a2b4d6e8f0a1c3e5b7d9f1a3c5e7b9d1f3")
    assert [redact([f"use {token} now"]) for token in tokens] == [["use [redacted] now"]] * 2


def test_scrubbed_runs_hold_no_secret(tmp_path):
    done = scrub(write_run(tmp_path / "run"), tmp_path / "out")
    assert not done.left_out
    files = dict(contents(tmp_path / "out"))
    assert len(files) == 4
    left = [(name, plant.kind) for name, text in files.items() for plant in PLANTED if plant.secret in text]
    assert not left


def test_another_scanner_finds_no_secret_in_a_scrubbed_run(tmp_path):
    run = write_run(tmp_path / "run")
    scrub(run, tmp_path / "out")
    assert len(reported(run)) > 30  # the scanner sees what is planted
    assert not reported(tmp_path / "out")


def reported(folder: Path) -> list[tuple[str, str, str]]:
    """Findings of detect-secrets but placeholders: file, kind and text."""
    with transient_settings({"plugins_used": [{"name": name} for name in SCANNERS]}):
        return [
            (name, found.type, str(found.secret_value))
            for name, text in contents(folder)
            for line in text.splitlines()
            for found in scan_line(line)
            if "<secret" not in str(found.secret_value) and not redaction.is_harmless(str(found.secret_value))
        ]


def test_redaction_changes_no_more_the_second_time():
    once = redact([plant.value for plant in PLANTED])
    assert redact(once) == once


def test_what_the_recorder_writes_itself_holds_no_secret(tmp_path):
    plain = tmp_path / "rank00000.window000.json"
    plain.write_text(json.dumps({"traceEvents": [event(0, json.dumps(plant.value)) for plant in PLANTED]}, indent=1))
    numbers = json.loads(plain.read_text())["traceEvents"][5]["ts"]
    atomic_files.compress(plain, tmp_path / "rank00000.pt.trace.json.gz")
    atomic_files.append_lines(tmp_path / "a.jsonl", [{"path": plant.value} for plant in PLANTED])
    atomic_files.write_json(tmp_path / "run.json", {})
    texts = dict(contents(tmp_path))
    assert not [plant.kind for plant in PLANTED if any(plant.secret in text for text in texts.values())]
    assert json.loads(texts["rank00000.pt.trace.json.gz"])["traceEvents"][5]["ts"] == numbers
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600


# A value, words of it that must not stay, and those of them that stand elsewhere too.
IDENTITIES = {
    "node list": ({"SLURM_JOB_NODELIST": "gpu[01-03,07]"}, ["gpu[01"], ["gpu01", "gpu03", "gpu07"]),
    "address with a prefix": ({"PET_MASTER_ADDR": "lead7.cluster"}, [], ["lead7"]),
    "job's user": ({"SLURM_JOB_USER": "rosalind"}, [], ["rosalind"]),
    "user of sudo": (["env", "SUDO_USER=rosalind"], [], ["rosalind"]),
    "pair of name and value": ([{"name": "NODE_NAME", "value": "worker-17-b"}], [], ["worker-17-b"]),
    "flag": (["--master-addr", "lead7"], [], ["lead7"]),
    "IPv6": (["tcp", "[2001:db8:0:1::17]:29500"], ["2001:db8"], ["2001:db8:0:1::17"]),
    "local IPv6": ("listens on fe80::1ff:fe23:4567:890a", ["fe80"], []),
    "remote by ssh": ("git@git.example.com:rosalind/llm.git", ["rosalind", "example"], []),
    "copy": ("rsync -a rosalind@login9:/scratch/x .", [], ["rosalind", "login9"]),
    "home": ("/mnt/home/rosalind/x.py", [], ["rosalind"]),
    "home folder by its sign": ("~rosalind/x.py", [], ["rosalind"]),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_scrubbed_runs_name_no_host_and_no_user(tmp_path, name):
    value, fragments, words = IDENTITIES[name]
    run = tmp_path / "run"
    run.mkdir()
    names = [event(number, f"sent to {word}, c10::add") for number, word in enumerate(words)]
    trace = {"traceEvents": [event(0, "x"), *names], "environment": value}
    (run / "rank0.json").write_text(json.dumps(trace))
    scrub(run, tmp_path / "out")
    text = (tmp_path / "out" / "rank0.json").read_text()
    assert not [word for word in [*fragments, *words] if word in text]
    assert text.count("c10::add") == len(names)


def test_a_secret_at_the_seam_of_two_pieces_and_a_string_that_ends_in_a_comma(tmp_path, monkeypatch):
    monkeypatch.setattr("tracekit.ingest.scrub.streams._PIECE_BYTES", 512)
    run = tmp_path / "run"
    run.mkdir()
    events = [
        event(number, 'tail,"'[: number % 6] + "," * (number % 3), words=["--api-key", f"opaque{number}x"])
        for number in range(60)
    ]
    (run / "rank0.json").write_text(json.dumps({"traceEvents": events}, separators=(",", ":")))
    scrub(run, tmp_path / "out")
    assert "opaque" not in (tmp_path / "out" / "rank0.json").read_text()
    assert [entry["name"] for entry in json.loads((tmp_path / "out" / "rank0.json").read_text())["traceEvents"]] == [
        entry["name"] for entry in events
    ]
