"""Secrets are looked for in time that grows with the text, whatever long run of characters it has."""

import json
import re
import time

import pytest

from tests.support.selection import others_in_accuracy
from tracekit.conventions import redaction
from tracekit.ingest.scrub import secrets

LENGTH = 20_000
"""A quadratic pattern such as `\\w+\\s*=` takes 4 s for such a run, linear ones up to 0.8 s."""
MAX_CPU_S = 2.5
BEGINNINGS = ("", "<", "name=", "://", "a(", "\\", "'", "password=", '<key="a" ')
REPEATED = (
    "a",
    "a.",
    "aA1",
    "-",
    "\\",
    "<",
    "'",
    '\\"',
    "://",
    " ",
    "\n",
    "{",
    "a=",
    "key=",
    "user=",
    "[a]",
    "@a",
    ":",
)
# Each is only used at a place that another pattern found, or of a whole text, where one attempt takes as long as it is.
FIXED_PLACE = ("_QUOTED", "_DISTINCTIVE", "_WORD_AND_NUMBER", "_COLON", "_COMMA")
PATTERNS = [
    (module.__name__.rpartition(".")[2], name)
    for module in (redaction, secrets)
    for name, value in vars(module).items()
    if isinstance(value, re.Pattern) and name not in FIXED_PLACE
]


def _cpu_s(call):
    began_s = time.process_time()
    call()
    return time.process_time() - began_s


@pytest.mark.parametrize(("module", "name"), PATTERNS)
def test_a_pattern_searches_long_runs_in_linear_time(module, name):
    pattern = getattr({"redaction": redaction, "secrets": secrets}[module], name)
    for repeated in REPEATED:
        text = repeated * (LENGTH // len(repeated))
        text = text if isinstance(pattern.pattern, str) else text.encode()
        assert _cpu_s(lambda text=text: list(pattern.finditer(text))) < MAX_CPU_S, repeated


@pytest.mark.parametrize("repeated", [b":", b"a:", b"1:", b"::1 ", b"f"])
def test_addresses_are_found_in_linear_time(repeated):
    text = repeated * (3 * LENGTH // len(repeated))
    assert _cpu_s(lambda: list(secrets._ipv6_addresses(text))) < MAX_CPU_S


@pytest.mark.parametrize("beginning", others_in_accuracy(BEGINNINGS, ["", "password=", '<key="a" ']))
def test_a_text_of_one_long_run_is_redacted_in_linear_time(beginning):
    for repeated in REPEATED:
        text = beginning + repeated * (LENGTH // len(repeated))
        assert _cpu_s(lambda text=text: redaction.redact(json.dumps(text).encode())) < MAX_CPU_S, repeated


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("a" * 300 + ";password=hunter2hunter2", "hunter2hunter2"),
        ("x" * 5000 + " token: s3cr3ts3cr3ts3cr3t", "s3cr3ts3cr3ts3cr3t"),
        ('password=token="two words and 3"', "two words and 3"),
        ("key=api_key=abc123def456ghi", "abc123def456ghi"),
        ("https://me:pa/ss@host.example/x", "pa/ss"),
    ],
)
def test_secrets_beside_long_runs_and_within_others_are_found(text, secret):
    assert secret not in redaction.redact(json.dumps(text).encode()).decode()
