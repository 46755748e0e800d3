"""What the code imports is what the project declares: a fresh installation lacks nothing."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {
    "dask_jobqueue": "dask-jobqueue",
    "google": "protobuf",
    "hta": "traceinsight",
    "opentelemetry": "opentelemetry-exporter-otlp-proto-http",
    "prometheus_client": "prometheus-client",
    "pytorch_lightning": "pytorch-lightning",
}
OUR_OWN = {"tracekit", "dashboard", "instrumented_trainers", "tests"}
OF_THE_INTERPRETER = {"sitecustomize"}


def imported(folder: str) -> set[str]:
    """Return the distributions that a package's sources import, whenever they do."""
    modules: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module)
    roots = (
        {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names) - OUR_OWN - OF_THE_INTERPRETER
    )
    return {DISTRIBUTIONS.get(root, root) for root in roots}


def statements(block: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a block and of those inside it; expressions import nothing, and are most of the nodes."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(block, name, ())
        for statement in inner if isinstance(inner, list) else ():
            yield statement
            yield from statements(statement)


def declared(*extras: str) -> set[str]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return {re.match(r"[A-Za-z0-9_-]+", line)[0] for line in lines}


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        (
            "tracekit",
            {
                "train",
                "cluster",
                "hta",
                "mcp",
                "pandas",
                "huggingface",
                "pytest",
                "remote",
                "tensorboard",
                "otlp",
                "prometheus",
            },
        ),
        ("dashboard", {"dashboard"}),
        ("instrumented_trainers", {"train", "tokenizers", "datasets", "wandb", "huggingface", "lightning"}),
    ],
)
def test_what_a_package_imports_is_declared(folder: str, extras: set[str]) -> None:
    assert imported(folder)
    assert imported(folder) <= declared(*extras)


def test_what_is_declared_has_one_version_in_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    extras = set(PROJECT["optional-dependencies"]) - {"all"}
    assert declared(*extras) <= pinned
