"""The Action's steps on a fresh clone: green, red at the right line, and one comment that is updated."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from tests.support import composite_action, doc_snippets
from tests.support.composite_action import Outcome

ACTION = doc_snippets.REPOSITORY / "action.yml"
Act = Callable[..., Outcome]
# Stands for GitHub: `gh api` on comments that lie in a file. It fails, as GitHub does, where the token cannot write.
GH = """#!/usr/bin/env python3
import json, os, pathlib, subprocess, sys
words = sys.argv[1:]
assert words.pop(0) == "api" and os.environ["GH_TOKEN"]
if os.environ["GH_TOKEN"] == "read-only":
    sys.exit("gh: Resource not accessible by integration (HTTP 403)")
store = pathlib.Path(os.environ["COMMENTS"])
comments = json.loads(store.read_text())
address = next(word for word in words if word.startswith("repos/team/project/issues/"))
if "--jq" in words:
    assert "--paginate" in words and address.endswith("/7/comments?per_page=100")
    query = words[words.index("--jq") + 1]
    sys.exit(subprocess.run(["jq", "-r", query], input=json.dumps(comments), text=True).returncode)
body = words[words.index("--field") + 1].removeprefix("body=@")
text = pathlib.Path(body).read_text()
if words[words.index("--method") + 1] == "POST":
    assert address.endswith("/7/comments")
    comments.append({"id": 100 + len(comments), "body": text})
else:
    (found,) = [each for each in comments if address.endswith(f"/issues/comments/{each['id']}")]
    found["body"] = text
store.write_text(json.dumps(comments))
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return doc_snippets.repository(tmp_path)


@pytest.fixture
def act(tmp_path: Path, clone: Path) -> Act:
    """Return what runs the Action on the clone, as the tutorial's workflow does."""
    environment = doc_snippets.environment(tmp_path)

    def run(**inputs: str) -> Outcome:
        given = {"run": "runs/today", "baseline": "baseline.json"} | inputs
        return composite_action.run(ACTION, given, cwd=clone, temp=tmp_path / "temp", environment=environment)

    return run


def record(build: str, clone: Path) -> None:
    """Put the recording of a build where the workflow puts it, and the code that was recorded."""
    doc_snippets.write(doc_snippets.files(changed=build == "red"), clone)
    shutil.rmtree(clone / "runs", ignore_errors=True)
    shutil.copytree(doc_snippets.SAMPLES / build, clone / "runs" / "today")


def test_the_action_is_valid() -> None:
    from check_jsonschema.builtin_schemas import get_builtin_schema  # slow for each worker to import

    Draft7Validator(get_builtin_schema("vendor.github-actions")).validate(composite_action.described(ACTION))


def test_a_build_is_green_and_red_after_a_regression(
    act: Act, clone: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    record("green", clone)
    green = act()
    assert (green.code, green.outputs["verdict"], green.annotations) == (0, "passed", [])
    assert "✅ Passed: nothing new, nothing worse than main" in green.summary

    record("red", clone)
    (tmp_path / "temp" / "summary.md").unlink()
    red = act(sarif="tracekit.sarif", junit="junit.xml", html="report.html")
    assert (red.code, red.outputs["verdict"]) == (1, "failed")
    assert red.steps[-1] == "Verdict"
    assert red.annotations[0].startswith("::error file=data.py,line=20,title=tracekit%3A data-stall (HOST003)::")
    assert (clone / "data.py").read_text().splitlines()[19] == "def fetched(rows, index):"
    assert {line.partition(",title")[0] for line in red.annotations} == {"::error file=data.py,line=20"}
    assert red.summary == Path(red.outputs["comment-file"]).read_text()
    _, shown_green, shown_red = (block.shown for block in doc_snippets.blocks())
    printed = [line for line in red.log.splitlines() if line.startswith(("tracekit: today", "::"))]
    if request.config.getoption("--update-golden"):
        text = doc_snippets.TUTORIAL.read_text().replace(doc_snippets.comment(), red.summary)
        doc_snippets.TUTORIAL.write_text(text.replace(shown_red, "\n".join(printed)))
    assert shown_green in green.log
    assert doc_snippets.plain("\n".join(printed)) == doc_snippets.plain(shown_red)
    assert doc_snippets.plain(red.summary) == doc_snippets.plain(doc_snippets.comment())

    log = json.loads((clone / "tracekit.sarif").read_text())
    schema = json.loads((doc_snippets.REPOSITORY / "tests" / "schemas" / "sarif-2.1.0.json").read_text())
    Draft7Validator(schema).validate(log)
    (place,) = log["runs"][0]["results"][0]["locations"]
    region = {"startLine": 20, "startColumn": 1, "endLine": 20, "endColumn": 26}
    assert place["physicalLocation"] == {"artifactLocation": {"uri": "data.py"}, "region": region}
    import xmlschema

    xmlschema.validate(clone / "junit.xml", doc_snippets.REPOSITORY / "tests" / "schemas" / "junit-10.xsd")
    assert "<!doctype html>" in (clone / "report.html").read_text()[:20]


def test_a_build_that_cannot_be_judged_fails_with_the_reason(act: Act) -> None:
    done = act(run="runs/nowhere")
    assert (done.code, done.outputs["verdict"], done.outputs["comment-file"]) == (2, "unusable", "")
    assert "runs/nowhere" in done.log


def test_extra_arguments_are_passed_to_the_check_unchanged(act: Act, clone: Path) -> None:
    record("red", clone)
    done = act(arguments="--select\nMEM003\n--fail-on\nnever", baseline="", run="runs/today\nruns/today\n")
    assert done.code == 0
    assert "Passed: 2 runs" in done.summary
    injected = act(arguments="--select\n$(touch injected)", config="`touch injected`")
    assert injected.code == 2
    assert not (clone / "injected").exists()


@pytest.mark.skipif(shutil.which("jq") is None, reason="what stands for gh needs jq")
def test_one_comment_is_updated(tmp_path: Path) -> None:
    environment = doc_snippets.environment(tmp_path)
    gh, store, comment = tmp_path / "bin" / "gh", tmp_path / "comments.json", tmp_path / "comment.md"
    gh.write_text(GH)
    gh.chmod(0o755)
    others = [{"id": 1, "body": "Nice.\n<!-- tracekit:check -->"}, {"id": 2, "body": "<!-- tracekit:other -->\n"}]
    store.write_text(json.dumps(others))
    environment |= {"COMMENTS": str(store), "GITHUB_REPOSITORY": "team/project"}
    pull_request = {"token": "secret", "event": {"pull_request": {"number": 7}}}

    def comments_after(text: str, github: object, **inputs: str) -> list[dict[str, object]]:
        comment.write_text(text)
        done = composite_action.run(
            ACTION,
            {"run": "runs/today", **inputs},
            cwd=tmp_path,
            temp=tmp_path / "temp",
            environment=environment,
            github=github,
            after={"check": {"comment-file": str(comment)}},
            only="Comment",
        )
        assert done.code == 0
        warned = ["::warning title=tracekit::The comment could not be written: see the job's summary"]
        assert done.annotations == (warned if github == forked else [])
        return list(json.loads(store.read_text()))

    forked = {**pull_request, "token": "read-only"}
    red, green = (f"<!-- tracekit:check -->\n### {verdict}\n$(touch x) `y` %0A\n" for verdict in ("red", "green"))
    assert comments_after(red, pull_request, comment="false") == others
    assert comments_after(red, {"token": "secret"}) == others  # a push has no pull request
    assert comments_after(red, forked) == others
    assert comments_after(red, pull_request) == [*others, {"id": 102, "body": red}]
    assert comments_after(green, pull_request) == [*others, {"id": 102, "body": green}]
