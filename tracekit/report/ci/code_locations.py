"""The location in a repository that a finding points at.

With stacks, it is the innermost function of the repository in which most of the evidence's time was spent. Without
stacks, it is the training script that run.json names, or the trace if the script is not in the repository.
"""

import ast
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import polars as pl

from tracekit.analysis.host import call_trees
from tracekit.conventions import regular_files
from tracekit.ingest.file_states import MAX_FILES, walk_visible
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.rules.rule import Finding

MIN_SHARE = 0.5
"""The least share of the evidence's time in the repository that a function must contain to be its location."""
_MODULE = "<module>"
_ANONYMOUS: Mapping[type[ast.expr], str] = {
    ast.Lambda: "<lambda>",
    ast.GeneratorExp: "<genexpr>",
    ast.ListComp: "<listcomp>",
    ast.DictComp: "<dictcomp>",
    ast.SetComp: "<setcomp>",
}
_MAX_SOURCE_BYTES = 4 << 20
SUFFIX = ".py"
SKIPPED_FOLDERS = ("site-packages", "node_modules", "__pycache__")
_MAX_EVIDENCE_ROWS = 1000


class LocationKind(StrEnum):
    """What a location is."""

    FUNCTION = "function"
    SCRIPT = "script"
    TRACE = "trace"


@dataclass(frozen=True)
class Location:
    """A line of a file. `path` is relative to the repository's root, with slashes; columns count from 1."""

    kind: LocationKind
    path: str
    line: int = 1
    start_column: int = 1
    end_column: int = 1
    """The column after the last."""
    function: str = ""


def repository_root(folder: Path) -> Path:
    """Return the repository that a folder lies in; the folder itself where it lies in none."""
    return next((place for place in (folder, *folder.parents) if (place / ".git").exists()), folder)


class Checkout:
    """The Python files of a repository, found by the names that traces and command lines call them."""

    def __init__(self, root: Path) -> None:
        """Take the repository at `root`; its files are listed at first use."""
        self.root = root.resolve()
        self._located: dict[tuple[Run, Finding | None], Location] = {}

    @property
    def is_listed(self) -> bool:
        """Whether a location depended on the files of the repository."""
        return "_files" in vars(self)

    def locate(self, run: Run, finding: Finding | None = None) -> Location:
        """Location of a finding, or without one, of the run. Results are cached."""
        key = run, finding
        if key not in self._located:
            function = self._function(run, finding) if finding is not None else None
            location = function or self._script(run.manifest) or self._trace(run, finding)
            # A file name may be bytes that are not valid text, which CI formats cannot hold.
            self._located[key] = replace(location, path=location.path.encode("utf-8", "replace").decode())
        return self._located[key]

    def _function(self, run: Run, finding: Finding) -> Location | None:
        evidence = _main_evidence(finding.evidence)
        if evidence is None:
            return None
        rank, window, rows = evidence
        try:
            ran = call_trees.functions(run.trace(rank, window), rows)
        except KeyError:  # evidence of a rank that has no trace, such as of its checkpoints
            return None
        calls = [
            (row["inside_ns"], location)
            for row in ran.iter_rows(named=True)
            if (location := self._function_location(row["file"], row["line"], row["function"])) is not None
        ]
        # A caller comes before its callee and includes its time: the last one with most of the time is innermost.
        longest_ns = max((inside_ns for inside_ns, _ in calls), default=0)
        candidates = [location for inside_ns, location in calls if inside_ns > MIN_SHARE * longest_ns]
        return candidates[-1] if candidates else None

    def _script(self, manifest: Mapping[str, object]) -> Location | None:
        for name in _scripts(Manifest.of(manifest).command):
            path = self._file(name)
            if path is not None:
                return self._location(LocationKind.SCRIPT, path, 1)
        return None

    def _trace(self, run: Run, finding: Finding | None) -> Location:
        ranks = finding.ranks if finding is not None else ()
        source = next((s for s in run.sources if s.rank in ranks), None) or next(iter(run.sources), None)
        name = source.path if source else run.path
        path = Path(name)
        if "://" not in name and path.resolve().is_relative_to(self.root):
            return Location(LocationKind.TRACE, path.resolve().relative_to(self.root).as_posix())
        return Location(LocationKind.TRACE, f"{run.name}/{path.name}")

    def _function_location(self, name: str, line: int, function: str) -> Location | None:
        """Return a function's location; None if no file of the repository contains the function."""
        path = self._file(name)
        # A call that began before the trace has the line it was at, other calls the first line of the function.
        first = path and _first_line(path, line, function)
        return self._location(LocationKind.FUNCTION, path, first, function) if path and first else None

    def _location(self, kind: LocationKind, path: Path, line: int, function: str = "") -> Location:
        text = (_lines(path)[line - 1 : line] or [""])[0]
        start = len(text) - len(text.lstrip()) + 1
        name = path.relative_to(self.root).as_posix()
        return Location(kind, name, line, start, max(start, len(text.rstrip()) + 1), function)

    def _file(self, name: str) -> Path | None:
        """Return the only file of the repository that a name can mean: a full path, or the end of one."""
        path = self.root / name  # the name itself where that is absolute
        if path in self._files:
            return path
        parts = PurePosixPath(name).parts
        # A full path may be of another machine: then its end is compared, with at least one folder.
        ends = [parts[first:] for first in range(1, len(parts) - 1)] if Path(name).is_absolute() else [parts]
        return next(filter(None, map(self._unique_suffix_match, ends)), None)

    def _unique_suffix_match(self, parts: Sequence[str]) -> Path | None:
        """Return the only file whose path ends so; None if there are none or several."""
        fitting = [path for path in self._by_name.get(parts[-1], ()) if path.parts[-len(parts) :] == tuple(parts)]
        return fitting[0] if len(fitting) == 1 else None

    @functools.cached_property
    def _files(self) -> frozenset[Path]:
        walk = walk_visible(str(self.root), SKIPPED_FOLDERS)
        paths = (Path(folder, name) for folder, names in walk for name in names if name.endswith(SUFFIX))
        return frozenset(itertools.islice(paths, MAX_FILES))

    @functools.cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        paths: dict[str, list[Path]] = {}
        for path in sorted(self._files):
            paths.setdefault(path.name, []).append(path)
        return paths


def _main_evidence(evidence: pl.DataFrame) -> tuple[int, int | None, pl.DataFrame] | None:
    """Return the rank and window in which most of the evidence's time lies, and its rows there."""
    if not {"rank", "start_ns", "dur_ns"} <= set(evidence.columns):
        return None
    rows = evidence.head(_MAX_EVIDENCE_ROWS).drop_nulls(["rank", "start_ns", "dur_ns"])
    if rows.is_empty():
        return None
    keys = [name for name in ("window", "rank") if name in rows.columns]
    totals = rows.group_by(keys).agg(pl.col("dur_ns").sum())
    first = totals.sort("dur_ns", *keys, descending=[True] + [False] * len(keys)).head(1)
    main_rows = rows.join(first.select(keys), on=keys, how="semi", nulls_equal=True)
    return int(first["rank"][0]), first["window"][0] if "window" in keys else None, main_rows


def _scripts(command: Sequence[object]) -> Iterator[str]:
    """Yield the script files that a command line may start, the most likely first."""
    words = [str(word) for word in command]
    if "-m" in words[:-1]:
        module = words[words.index("-m") + 1].replace(".", "/")
        yield from (f"{module}/__main__.py", f"{module}.py")
    yield from (word for word in words[:2] if word.endswith(".py"))


@functools.lru_cache(maxsize=256)
def _lines(path: Path) -> tuple[str, ...]:
    try:
        if path.stat().st_size > _MAX_SOURCE_BYTES:
            return ()
        return tuple(regular_files.read_text(path, errors="replace").splitlines())
    except OSError:
        return ()


class _Function(NamedTuple):
    """A function of a file: its lines, decorators included, and the line of its def."""

    name: str
    first: int
    last: int
    def_line: int


@functools.lru_cache(maxsize=256)
def _functions(path: Path) -> tuple[_Function, ...]:
    try:
        tree = ast.parse("\n".join(_lines(path)))
    except (SyntaxError, ValueError):
        return ()
    functions = [_Function(_MODULE, 1, len(_lines(path)), 1)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            functions.append(_Function(node.name, first, node.end_lineno or first, node.lineno))
        elif isinstance(node, ast.expr) and type(node) in _ANONYMOUS:
            last = node.end_lineno or node.lineno
            functions.append(_Function(_ANONYMOUS[type(node)], node.lineno, last, node.lineno))
    return tuple(functions)


def _first_line(path: Path, line: int, function: str) -> int | None:
    """Return the def line of the innermost function with a name that contains a line; for a module, the line itself."""
    around = [f for f in _functions(path) if f.name == function and f.first <= line <= f.last]
    if not around:
        return None
    return line if function == _MODULE else max(f.def_line for f in around)
