"""The files of stored answers, and the states of what an answer depends on.

The key of an answer has the words of the command and all that shapes output around it: the current folder with the
settings files that are searched from there, the terminal, variables, tracekit's code and what is installed. An entry
also has what the command has read: it is used only while the states of all of that are those that it was made of.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from tracekit import conventions
from tracekit.cli.question import Answer, Input, Kind, State
from tracekit.ingest import file_states
from tracekit.ingest.disk_cache import DiskCache, plugin_source
from tracekit.ingest.file_states import FileStates
from tracekit.model import plugins as distributions

_PACKAGE = Path(conventions.__file__).parents[1]
_SETTINGS_FILES, _REPOSITORY = ("tracekit.toml", "pyproject.toml"), ".git"
_VARIABLES = (
    "TRACEKIT_",
    "PYTHON",
    "LC_",
    "LANG",
    "NO_COLOR",
    "FORCE_COLOR",
    "COLORTERM",
    "TERM",
    "TTY_",
    "COLUMNS",
    "LINES",
    "JUPYTER_",
    "GITHUB_ACTIONS",
)
"""How the names of variables begin that shape output."""
_DISTRIBUTIONS = (".dist-info", ".egg-info", ".egg-link", ".pth")
_GROUPS = ("tracekit.rules", "tracekit.readers", "tracekit.metrics", "tracekit.causes")
_NO_SOURCES = ("__pycache__",)


def find(context: State) -> Answer | None:
    """Answer that was given in this context; None if there is none, or it was made of other input."""
    entry = DiskCache.of_user("answers").get(_key(context), _read)
    if entry is None:
        return None
    answer, stamps = entry
    is_current = all((state := state_of(source)) and state.stamp == stamp for source, stamp in stamps.items())
    return answer if is_current else None


def store(context: State, answer: Answer, inputs: Mapping[Input, State]) -> None:
    """Store an answer that was made of `inputs`."""
    DiskCache.of_user("answers").put(_key(context), partial(_write, answer, inputs))


def state_of(source: Input) -> State | None:
    """State of an input now; None if it cannot be known, or is being written."""
    if source.kind is Kind.DAY:
        return State(str(datetime.datetime.now(datetime.UTC).date()))
    if source.kind is Kind.RUN:
        states = file_states.of_run(source.path, source.names)
        if states and any(file.path.endswith(conventions.PARTIAL_SUFFIX) for file in states.files):
            return None
    elif source.kind is Kind.SOURCES:
        states = file_states.of_tree(source.path, ".py", left_out=source.names)
    else:
        states = file_states.of_files([source.path])
    return None if states is None else _state(states, os.path.realpath(source.path))


def context(words: Sequence[str]) -> State | None:
    """State of all that shapes output, except what the command reads; None if it cannot be known."""
    try:
        folder = Path.cwd()
    except OSError:  # it was removed
        return None
    places = (folder, *folder.parents)
    repositories = [str(place) for place in places if (place / _REPOSITORY).exists()]
    settings = [str(place / name) for place in places for name in _SETTINGS_FILES]
    package = file_states.of_tree(str(_PACKAGE), left_out=_NO_SOURCES)
    if package is None:
        return None
    files = FileStates((*package.files, *file_states.of_files([*settings, *_installed_packages()]).files))
    terminal = [(stream.isatty(), stream.encoding) for stream in (sys.stdout, sys.stderr)]
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES))
    around = (str(folder), repositories, terminal, shutil.get_terminal_size(), variables, sys.version, sys.path)
    return _state(files, words, *around)


def plugins() -> Iterator[Input]:
    """Yield the sources of the plug-ins that were imported."""
    for point in (point for group in _GROUPS for point in distributions.entry_points(group)):
        if point.module in sys.modules:
            plugin = point.load()
            source = plugin_source(plugin if isinstance(plugin, (type, ModuleType)) else type(plugin))
            yield Input(Kind.SOURCES if source.is_dir() else Kind.FILE, str(source), _NO_SOURCES)


def _installed_packages() -> Iterator[str]:
    """Yield the paths of what is installed: names with versions, and the entry points of each distribution."""
    for place in dict.fromkeys(sys.path):
        try:
            with os.scandir(place or os.curdir) as entries:
                names = sorted(entry.name for entry in entries if entry.name.endswith(_DISTRIBUTIONS))
        except OSError:  # the import path may name folders that do not exist, and archives
            yield place
            continue
        for name in names:
            yield f"{place}/{name}"
            yield f"{place}/{name}/entry_points.txt"


def _state(states: FileStates, *others: object) -> State:
    return State(json.dumps([states.stamp, *others]), states.touched_ns)


def _key(context: State) -> str:
    return hashlib.sha256(context.stamp.encode()).hexdigest()


def _write(answer: Answer, inputs: Mapping[Input, State], file: BinaryIO) -> None:
    stamps = [(*dataclasses.astuple(source), state.stamp) for source, state in inputs.items()]
    content = json.dumps([answer.texts, answer.exit_code, stamps]).encode()
    file.write(b"%08x\n%s" % (zlib.crc32(content), content))


def _read(file: BinaryIO) -> tuple[Answer, Mapping[Input, str]]:
    checksum, _, content = file.read().partition(b"\n")
    if int(checksum, 16) != zlib.crc32(content):
        raise ValueError("the answer is damaged")
    texts, exit_code, inputs = json.loads(content)
    stamps = {Input(Kind(kind), path, tuple(names)): stamp for kind, path, names, stamp in inputs}
    return Answer([(stream, text) for stream, text in texts], exit_code), stamps
