"""What the guides for CI show: files of a repository, commands with what they print, recipes. Not a test."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import composite_action
from tests.support.python_path import PYTHON_PATH, REPOSITORY

DOCS = REPOSITORY / "docs"
SAMPLES = REPOSITORY / "sample_traces" / "ci"
TUTORIAL = DOCS / "ci_tutorial.md"
_FILE = re.compile(r"^`([\w./-]+)`(, changed)?:\n\n```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """Commands that the tutorial types one after the other, and what it shows of what they print."""

    commands: tuple[str, ...]
    shown: str


def files(*, changed: bool = False) -> dict[str, str]:
    """Return the files of the tutorial's repository by name, or those that it changes."""
    found = _FILE.findall(TUTORIAL.read_text(encoding="utf-8"))
    return {name: text for name, change, text in found if bool(change) == changed}


def blocks() -> list[Block]:
    made = []
    for block in _CONSOLE.findall(TUTORIAL.read_text(encoding="utf-8")):
        lines = block.splitlines()
        commands = tuple(line.removeprefix("$ ") for line in lines if line.startswith("$ "))
        made.append(Block(commands, "\n".join(line for line in lines if not line.startswith("$ "))))
    return made


def comment() -> str:
    """Return the comment that the tutorial shows."""
    (found,) = re.findall(r"^````markdown\n(.*?)^````$", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return str(found)


def repository(folder: Path) -> Path:
    """Return a fresh clone of the tutorial's repository."""
    origin = folder / "origin"
    origin.mkdir(parents=True)
    write(files(), origin)
    (origin / "baseline.json").write_bytes((SAMPLES / "baseline.json").read_bytes())
    git("init", "--quiet", cwd=origin)
    git("add", "--all", cwd=origin)
    git("commit", "--quiet", "--message", "Train", cwd=origin)
    clone = folder / "clone"
    git("clone", "--quiet", str(origin), str(clone), cwd=folder)
    return clone


def write(texts: dict[str, str], folder: Path) -> None:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def git(*words: str, cwd: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    someone = ("-c", "user.name=Someone", "-c", "user.email=someone@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *someone, *words], cwd=cwd, check=True, capture_output=True)


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which `tracekit`, `torchrun` and `python3` are of this checkout and this Python."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, words in (("tracekit", "-m tracekit"), ("torchrun", "-m torch.distributed.run"), ("python3", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        program.chmod(0o755)
    path = f"{programs}:{composite_action.environment()['PATH']}"
    return composite_action.environment(PATH=path, PYTHONPATH=PYTHON_PATH)


def plain(text: str) -> str:
    """Return what a check prints without the numbers that depend on its statistics, which may improve.

    Verdicts do not depend on them. Only metrics that fail are left, without their numbers; findings stay as they are.
    """
    lines = []
    for line in text.splitlines():
        drawn = re.search("[█▏▎▍▌▋▊▉]", line)
        counted = line.startswith("- about how many more") or (line.startswith("| ") and not re.search("❌|---", line))
        if not drawn and not counted:
            statistics = re.search(r"❌ worse|regressed|^\*\*host", line)
            lines.append(re.sub(r"[-+]?\d[\d.,]*( [mµn]?s)?(?=\D)", "N", line) if statistics else line)
    return "\n".join(lines)
