"""Files that GitHub reads: workflows, issue forms and the citation are valid; the citation has the current version."""

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from tracekit import conventions

ROOT = Path(__file__).parents[3]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    **dict.fromkeys(WORKFLOWS, "vendor.github-workflows"),
    **dict.fromkeys(sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")), "vendor.github-issue-forms"),
    GITHUB / "ISSUE_TEMPLATE" / "config.yml": "vendor.github-issue-config",
    ROOT / "CITATION.cff": "vendor.citation-file-format",
}


def document(file: Path) -> dict[str, Any]:
    # YAML 1.1 reads the key "on" as true.
    return {
        "on" if key is True else key: value for key, value in yaml.safe_load(file.read_text(encoding="utf-8")).items()
    }


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.name)
def test_each_file_is_valid_by_its_published_schema(file: Path) -> None:
    schemas = pytest.importorskip("check_jsonschema.builtin_schemas", reason="needs the extra [dev]")
    from jsonschema import validators

    schema = schemas.get_builtin_schema(SCHEMAS[file])
    validators.validator_for(schema)(schema).validate(document(file))


def test_the_citation_has_the_current_version() -> None:
    assert document(ROOT / "CITATION.cff")["version"] == conventions.VERSION


def test_zizmor_finds_nothing_in_the_workflows() -> None:
    program = Path(sysconfig.get_path("scripts")) / "zizmor"
    if not program.exists():
        pytest.skip("needs the extra [dev]")
    command = [program, "--offline", "--no-exit-codes", "--format=json", "--no-progress", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_only_the_job_that_publishes_has_an_identity(file: Path) -> None:
    jobs = document(file)["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["publish"]
    assert not any("run" in step for step in jobs["publish"]["steps"])
