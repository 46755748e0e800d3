"""The guides for CI: the tutorial's commands make a red build, and recipes are valid and run as they stand."""

import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.support import composite_action, doc_snippets

RECIPES = (doc_snippets.DOCS / "ci_recipes.md").read_text(encoding="utf-8")
YAML: dict[str, str] = dict(re.findall(r"^```yaml\n# (\S+)\n(.*?)^```$", RECIPES, re.DOTALL | re.MULTILINE))
WORKFLOWS = {name: text for name, text in YAML.items() if name.startswith(".github")}
WORKFLOWS["tutorial"] = doc_snippets.files()[".github/workflows/performance.yml"]
JENKINS = re.findall(r"sh '([^']*)'", RECIPES)


@pytest.mark.accuracy  # what the commands print of recorded builds is in test_ci_action.py
def test_the_tutorial_ends_with_a_red_build(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    doc_snippets.write(doc_snippets.files(), folder)
    doc_snippets.git("init", "--quiet", cwd=folder)
    environment = doc_snippets.environment(tmp_path)
    *before, red = doc_snippets.blocks()
    for block in before:
        for command in block.commands:
            done = composite_action.bash(command, cwd=folder, environment=environment)
            assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed: nothing new, nothing worse than main" in done.stdout
    doc_snippets.write(doc_snippets.files(changed=True), folder)
    for command in red.commands:
        done = composite_action.bash(command, cwd=folder, environment=environment)
    assert done.returncode == 1, done.stderr
    annotations = [line for line in done.stdout.splitlines() if line.startswith("::")]
    promised = next(line for line in red.shown.splitlines() if line.startswith("::"))
    assert annotations[0].split("::")[1] == promised.split("::")[1]  # the line of code and the rule; times differ
    action = composite_action.run(
        doc_snippets.REPOSITORY / "action.yml",
        {"run": "runs/today", "baseline": "baseline.json"},
        cwd=folder,
        temp=tmp_path / "temp",
        environment=environment,
    )
    assert (action.code, action.outputs["verdict"]) == (1, "failed")
    assert action.annotations == annotations


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_are_valid_and_name_inputs_that_the_action_has(name: str) -> None:
    from check_jsonschema.builtin_schemas import get_builtin_schema  # slow for each worker to import

    workflow = yaml.safe_load(WORKFLOWS[name])
    # YAML 1.1 reads the key "on" as true.
    document = {"on" if key is True else key: value for key, value in workflow.items()}
    Draft7Validator(get_builtin_schema("vendor.github-workflows")).validate(document)
    inputs = composite_action.described(doc_snippets.REPOSITORY / "action.yml")["inputs"]
    for step in _steps(document):
        if step.get("uses", "").startswith("OWNER/tracekit@"):
            assert set(step["with"]) <= set(inputs)


def test_the_pipeline_is_valid() -> None:
    from check_jsonschema.builtin_schemas import get_builtin_schema

    Draft7Validator(get_builtin_schema("vendor.gitlab-ci")).validate(yaml.safe_load(YAML[".gitlab-ci.yml"]))


@pytest.mark.accuracy  # unit/docs/test_docs has their options, test_ci_action the Action
def test_commands_of_the_recipes_run_on_a_recorded_run(tmp_path: Path) -> None:
    clone = doc_snippets.repository(tmp_path)
    doc_snippets.write(doc_snippets.files(changed=True), clone)
    for place in ("today", "1", "2", "3"):
        shutil.copytree(doc_snippets.SAMPLES / "red", clone / "runs" / place)
    shutil.copyfile(clone / "baseline.json", clone / "nightly.json")
    (clone / "nightly.toml").write_text('fail_on = "warning"\n')
    environment = doc_snippets.environment(tmp_path) | {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    scripts = [step["run"] for text in WORKFLOWS.values() for step in _steps(yaml.safe_load(text)) if "run" in step]
    scripts += yaml.safe_load(YAML[".gitlab-ci.yml"])["performance"]["script"]
    scripts += [script.replace(".venv/bin/", "") for script in JENKINS]
    came = {}
    for script in scripts:
        if "pip install" not in script and "tracekit record" not in script:
            done = composite_action.bash(script, cwd=clone, environment=environment)
            came[script] = done.returncode
            assert done.returncode in (0, 1), done.stderr
    judging = [script for script in came if script.startswith("tracekit")]
    assert len(judging) == 5
    assert {came[script] for script in judging} == {1}
    assert "Failed" in (tmp_path / "summary.md").read_text()
    for file in ("tracekit.md", "tracekit.sarif", "junit.xml", "codequality.json", "report.html"):
        assert (clone / file).stat().st_size > 0


def test_zizmor_finds_nothing_in_the_action_and_in_workflows(tmp_path: Path) -> None:
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    for number, text in enumerate(WORKFLOWS.values()):
        (folder / f"{number}.yml").write_text(text, encoding="utf-8")
    # The recipes name actions by tag, as they are read; the page says to pin them.
    (tmp_path / "zizmor.yml").write_text("rules: {unpinned-uses: {disable: true}}", encoding="utf-8")
    findings = audit(doc_snippets.REPOSITORY / "action.yml") + audit("--config", tmp_path / "zizmor.yml", tmp_path)
    assert [(finding["ident"], finding["locations"][0]["symbolic"]["route"]) for finding in findings] == []


def audit(*arguments: str | Path) -> list[dict[str, Any]]:
    """Run zizmor's own executable without network; its findings."""
    program = Path(sysconfig.get_path("scripts")) / "zizmor"
    command = [program, "--offline", "--no-exit-codes", "--format=json", "--no-progress", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    findings: list[dict[str, Any]] = json.loads(done.stdout)
    return findings


def _steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]
