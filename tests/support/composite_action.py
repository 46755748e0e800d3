"""Run the steps of a composite GitHub Action as GitHub's runner does: its bash, files and expressions. Not a test."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_EXPRESSION = re.compile(r"\$\{\{\s*([\w.-]+)\s*\}\}")
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")


@dataclass
class Outcome:
    """What an action did: its exit code, what it printed, its outputs and what it wrote into the job's summary."""

    code: int
    log: str
    outputs: dict[str, str]
    summary: str
    steps: list[str] = field(default_factory=list)
    """The names of the steps that ran."""

    @property
    def annotations(self) -> list[str]:
        return [line for line in self.log.splitlines() if line.startswith("::")]


def run(
    action: Path,
    inputs: Mapping[str, str],
    *,
    cwd: Path,
    temp: Path,
    environment: Mapping[str, str],
    github: Any = None,
    after: Mapping[str, Mapping[str, str]] | None = None,
    only: str = "",
) -> Outcome:
    """Run an action.yml with these inputs in the working tree `cwd`; `github` is what expressions call github.

    `only` names the one step to run, after others with the outputs `after`, by their id.
    """
    definition = described(action)
    unknown = set(inputs) - set(definition["inputs"])
    assert not unknown, f"the action has no inputs {unknown}"
    context: dict[str, Any] = {"github": {**(github or {}), "action_path": str(action.parent)}, "inputs": {}}
    context["steps"] = {name: {"outputs": given} for name, given in (after or {}).items()}
    for name, each in definition["inputs"].items():
        assert not each.get("required") or name in inputs, f"the action needs {name}"
        context["inputs"][name] = inputs.get(name, _evaluated(each.get("default", ""), context))
    temp.mkdir(parents=True, exist_ok=True)
    summary = temp / "summary.md"
    summary.touch()
    done = Outcome(0, "", {}, "")
    for number, step in enumerate(definition["runs"]["steps"]):
        assert step["shell"] == "bash"
        if only not in ("", step["name"]):
            continue
        output = temp / f"output-{number}"
        output.touch()
        made = {name: _evaluated(value, context) for name, value in step.get("env", {}).items()}
        runner = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "RUNNER_TEMP": str(temp)}
        ran = bash(step["run"], cwd=cwd, environment={**environment, **runner, **made})
        done.log += ran.stdout + ran.stderr
        done.steps.append(step["name"])
        given = dict(line.split("=", 1) for line in output.read_text().splitlines())
        context["steps"][step.get("id", f"_{number}")] = {"outputs": given}
        if ran.returncode:
            done.code = ran.returncode
            break
    done.outputs = {name: _evaluated(each["value"], context) for name, each in definition["outputs"].items()}
    done.summary = summary.read_text(encoding="utf-8")
    return done


def described(action: Path) -> dict[str, Any]:
    """Return what an action.yml says."""
    return dict(yaml.safe_load(action.read_text(encoding="utf-8")))


def bash(script: str, *, cwd: Path, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a script as a step of a workflow."""
    return subprocess.run(
        [*BASH, "-c", script], cwd=cwd, env=dict(environment), capture_output=True, text=True, timeout=300, check=False
    )


def environment(**extra: str) -> dict[str, str]:
    """Return what a runner gives: nothing of a terminal, and no settings of the tests' own."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "COLUMNS", "NO_COLOR"))
    }
    return inherited | {"OMP_NUM_THREADS": "1", "CI": "true", "GITHUB_ACTIONS": "true"} | extra


def _evaluated(text: str, context: Mapping[str, Any]) -> str:
    def value(match: "re.Match[str]") -> str:
        found: Any = context
        for part in match[1].split("."):
            found = found.get(part, {}) if isinstance(found, Mapping) else {}
        return "" if found == {} else str(found)

    return _EXPRESSION.sub(value, str(text))
