"""Commands, options and modules in the documentation exist, and so do the targets of its links. Nothing is run here."""

import re
import shlex
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import pytest
import typer.main

from tracekit.capture.launcher import command as recording
from tracekit.cli import application
from tracekit.cli.application import app

ROOT = Path(__file__).parents[3]
GUIDES = sorted(ROOT.glob("docs/*.md"))
NOTES = sorted(ROOT.glob("docs/lab/*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "sample_traces" / "README.md", *GUIDES, *NOTES]
HISTORIC = ROOT / "CHANGELOG.md"
INDEX = ROOT / "docs" / "README.md"
INDEX_OF_NOTES = ROOT / "docs" / "lab" / "README.md"
COMMANDS = typer.main.get_command(app)
_FENCED = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"^ {4}(.*)$", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PROMPTS = re.compile(r"^(?:\$ |- (?:run: )?|run: |sh '|\.venv/bin/)+")
_OF_THE_SHELL = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "<", "-<"})
_PASSED_ON = {"record": recording.record, "merge": recording.merge_run}


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def by_itself(page: Path) -> str:
    """Return a page without its blocks of code."""
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def lines_of_code(page: Path) -> list[str]:
    """Return the lines of a page's blocks of code, those that a backslash continues joined."""
    text = page.read_text(encoding="utf-8")
    blocks = [body for _, _, body in _FENCED.findall(text)] + _INDENTED.findall(by_itself(page))
    return "\n".join(blocks).replace("\\\n", " ").splitlines()


def typed(line: str, program: str) -> list[str] | None:
    """Return what a line of code gives to a program; None where it starts another one."""
    in_jenkins = line.strip().startswith("sh '")
    line = _PROMPTS.sub("", line.strip())
    line = line.removesuffix("'") if in_jenkins else line
    if not line.startswith(f"{program} "):
        return None
    words = shlex.split(line.removeprefix(program), comments=True)
    return list(takewhile(lambda word: word not in _OF_THE_SHELL, words))


def refused(words: list[str]) -> str | None:
    """Return why `tracekit` would refuse these words before it does anything; None where it would not."""
    found = COMMANDS
    if words[0] in _PASSED_ON:
        return None if _is_parsed(words) else f"tracekit {words[0]} refuses its options"
    if words[0].startswith("-"):
        return None if words[0] in ("--help", "--version", "--debug") else f"{words[0]} is not an option"
    words = list(words)
    while hasattr(found, "commands"):
        name = words.pop(0) if words else ""
        if name not in found.commands:
            return f"there is no command {name!r}"
        found = found.commands[name]
    try:
        found.make_context(name, words)
    except Exception as error:  # noqa: BLE001 of a class that typer does not name
        return f"{type(error).__name__}: {error}"
    return None


def _is_parsed(words: list[str]) -> bool:
    parser = recording._parser("tracekit record")  # nothing else parses without running
    try:
        if words[0] == "record":
            parser.parse_args(words[1:])
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_command_in_a_block_of_code_is_one_that_tracekit_takes(page: Path) -> None:
    commands = [words for line in lines_of_code(page) if (words := typed(line, "tracekit"))]
    assert not {shlex.join(words): why for words in commands if (why := refused(words))}


@pytest.mark.parametrize("page", [*PAGES, HISTORIC], ids=shown)
def test_every_command_named_in_a_sentence_exists_with_its_options(page: Path) -> None:
    missing = []
    for code in _INLINE.findall(by_itself(page)):
        if code.startswith("tracekit "):
            missing += [f"{code}: {each}" for each in _unknown(code.split()[1:])]
    assert not missing


def _unknown(words: list[str]) -> list[str]:
    """Return the commands and options among some words that there are not; what is a placeholder is passed over.

    The change log has the names of its time.
    """
    found = COMMANDS
    words = ["--out" if word == "--output" else word for word in application.current_words(words)]
    if words[0].isupper():
        return []
    while words and hasattr(found, "commands"):
        names = words.pop(0).split("|")
        if absent := [name for name in names if name not in found.commands and not name.startswith("-")]:
            return absent
        if names[0].startswith("-"):
            return []
        found = found.commands[names[0]]
    if found.name in _PASSED_ON:
        known = {option for action in recording._parser("")._actions for option in action.option_strings}
    else:
        known = {option for parameter in found.params for option in [*parameter.opts, *parameter.secondary_opts]}
    own = takewhile(lambda word: word not in {"--", *_OF_THE_SHELL}, words)
    options = [word.strip("[]…,").partition("=")[0] for word in own if word.startswith(("-", "[-"))]
    return [option for option in options if option and option not in known]


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_module_that_is_to_be_run_is_there(page: Path) -> None:
    named = set(re.findall(r"python3? -m ([\w.]+)", page.read_text(encoding="utf-8")))
    ours = {name for name in named if name.partition(".")[0] in ("tracekit", "benchmarks", "instrumented_trainers")}
    assert not [name for name in ours if find_spec(name) is None]


@pytest.mark.parametrize("page", [*PAGES, HISTORIC], ids=shown)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in _LINK.findall(by_itself(page)):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (heading and heading not in headings(there)):
            broken.append(target)
    assert not broken


def headings(page: Path) -> set[str]:
    """Return the names by which GitHub lets links point at a page's headings."""
    found = re.findall(r"^#+ (.*)$", by_itself(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in found}


@pytest.mark.parametrize(("index", "pages"), [(INDEX, GUIDES), (INDEX_OF_NOTES, NOTES)], ids=["guides", "notes"])
def test_the_index_leads_to_every_page(index: Path, pages: list[Path]) -> None:
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in _LINK.findall(by_itself(index))}
    assert not [page.name for page in pages if page != index and page not in linked]


def test_the_guides_lead_to_the_laboratory_notes() -> None:
    assert "(lab/README.md)" in INDEX.read_text(encoding="utf-8")


def test_no_picture_lies_about_that_no_page_shows() -> None:
    shown_somewhere = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not [path.name for path in ROOT.glob("docs/images/*") if f"images/{path.name})" not in shown_somewhere]


def test_the_index_lists_every_environment_variable_that_the_code_reads() -> None:
    packages = ("tracekit", "dashboard", "instrumented_trainers")
    sources = [path.read_text(encoding="utf-8") for name in packages for path in (ROOT / name).rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"\bTRACEKIT_[A-Z_]+", text)}
    listed = set(re.findall(r"`(TRACEKIT_[A-Z_]+)`", INDEX.read_text(encoding="utf-8")))
    assert read == listed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["chekc", "RUN"], "there is no command 'chekc'"),
        (["check", "RUN", "--selekt", "COMM"], "No such option: --selekt"),
        (["check", "RUN", "--fail-on", "fatal"], "'fatal' is not one of"),
        (["baseline", "save", "RUN"], "Missing"),
        (["record", "--stpes", "3:5", "--", "true"], "refuses its options"),
    ],
)
def test_a_command_that_does_not_exist_is_reported(words: list[str], why: str) -> None:
    assert why in (refused(words) or "")


def test_every_change_has_one_line_in_the_changelog() -> None:
    versions = HISTORIC.read_text(encoding="utf-8").split("\n## ")[1:]
    entries = [line for version in versions for line in version.splitlines()[1:] if line]
    assert entries
    assert not [line for line in entries if not line.startswith("- ") or len(line) > 140]
