"""JSON of any content can be serialized again or is a ValueError."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracekit
from tests.browser import recorded
from tests.support import cli_runner
from tracekit.ingest import untrusted_json

SURROGATE = "\ud800"
texts = st.text(st.characters() | st.characters(categories=["Cs"]), max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
)


@given(values)
def test_parsed_values_can_be_serialized_and_only_lone_surrogates_change(value):
    text = json.dumps(value)
    found = untrusted_json.parse(text)
    assert found == untrusted_json.parse(text.encode())
    json.dumps(found, ensure_ascii=False).encode()
    encoded = json.dumps(json.loads(text), ensure_ascii=False)
    assert found == json.loads(encoded.encode("utf-8", "replace"))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "[1", b"\xff"])
def test_invalid_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"nested|Expecting|decode"):
        untrusted_json.parse(text)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    recorded.write_run(folder, kernel="gemm")
    return folder


def with_surrogates(value):
    """Return a manifest whose strings, keys included, end with a lone surrogate."""
    if isinstance(value, dict):
        return {name: with_surrogates(inner) for name, inner in value.items()} | {f"more{SURROGATE}": SURROGATE}
    return value + SURROGATE if isinstance(value, str) else value


def test_every_command_accepts_a_manifest_with_lone_surrogates(run, tmp_path):
    path = run / "run.json"
    path.write_text(json.dumps(with_surrogates(json.loads(path.read_text()))))
    for words in (
        "baseline save run --out baseline.json",
        "check run --baseline baseline.json --fail-on never --history history.duckdb --also html=report.html",
        "check run --fail-on never --format json --also sarif=report.sarif --also junit=report.xml",
        "compare run run",
        "scrub run scrubbed",
    ):
        done = cli_runner.tracekit(*words.split(), cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)


def test_a_manifest_nested_too_deeply_is_a_data_quality_issue(run):
    (run / "run.json").write_text("[" * 100_000)
    issues = tracekit.load(run).data_quality
    assert issues.filter(issues["kind"] == "bad_manifest").height == 1
