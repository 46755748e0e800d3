"""The examples for Slurm and Kubernetes are valid, and `tracekit record` takes the commands in them."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tracekit.capture.launcher import command as recording
from tracekit.conventions import regular_files

EXAMPLES = Path(__file__).parents[3] / "examples"
SBATCH = EXAMPLES / "two_nodes.sbatch"
KUBERNETES = EXAMPLES / "kubernetes_job.yaml"


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(regular_files.read_text(KUBERNETES)))


def recorded_command(words: list[str]) -> list[str]:
    """Command that `tracekit record` starts; a SystemExit where it refuses its options."""
    assert words[:2] == ["tracekit", "record"]
    parsed = recording._parser("tracekit record").parse_args(words[2:])
    return [word for word in parsed.command if word != "--"]


def test_the_script_for_slurm_is_one_of_bash_and_records_on_each_node() -> None:
    assert subprocess.run(["bash", "-n", SBATCH], check=False).returncode == 0
    text = regular_files.read_text(SBATCH).replace("\\\n", " ")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert (options["nodes"], options["ntasks-per-node"]) == ("2", "1")
    (line,) = re.findall(r"^srun (.+)$", text, re.MULTILINE)
    words = recorded_command(shlex.split(line))
    assert words[0] == "torchrun"
    assert words[words.index("--nproc-per-node") + 1] == options["gpus-per-node"]


def test_the_job_for_kubernetes_records_on_each_node() -> None:
    service, job = documents()
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    words = recorded_command([*container["command"], *container["args"]])
    assert words[0] == "torchrun"
    assert f"--nnodes={spec['completions']}" in words
    assert spec["parallelism"] == spec["completions"]
    # Kubernetes names the pods of an indexed Job by its name and their index.
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert any(word.startswith(f"--rdzv-endpoint={host}:") for word in words)
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        v["name"] for v in spec["template"]["spec"]["volumes"]
    }


def test_kubernetes_takes_the_job_by_its_schemas() -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: 108 MB of schemas"
    )
    for document in documents():
        validator.validate(document, validator.latest_version(), strict=True)
