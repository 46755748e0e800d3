"""The report at the end of a recorded command: what was recorded, what is missing and why, and what to run next."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tracekit import conventions
from tracekit.capture import atomic_files, attempts, notices, uploader
from tracekit.capture.launch_settings import Settings
from tracekit.capture.window_schedule import parse_steps
from tracekit.conventions import object_storage, python_child, regular_files

_OTHERS_WAIT_S = 30.0
_ORPHAN_WAIT_S = 20.0
_NEEDED_TO_CHECK = ("polars", "msgspec", "rich")


@dataclass(frozen=True)
class Note:
    """What one recorded process reported."""

    folder: Path
    rank: int
    world_size: int
    steps: int
    ended: bool


def report(settings: Settings, *, code: int, quiet: bool) -> None:
    """Move remaining traces into the run; report what was recorded on this node and what to run next."""
    notes, failed = read_notes(Path(settings.notes))
    for note in notes:
        is_unfinished_upload = object_storage.is_url(settings.out) and not note.ended
        deadline = time.monotonic() + _ORPHAN_WAIT_S
        while is_unfinished_upload and note.folder.is_dir() and time.monotonic() < deadline:
            time.sleep(0.1)  # the uploading process of a killed rank empties and removes its staging folder
        atomic_files.move_traces(Path(settings.scratch), note.folder, note.rank)
        if is_unfinished_upload and note.folder.is_dir():  # what that process left
            training = note.folder.name.removeprefix(uploader.STAGING_PREFIX)
            upload = uploader.RunUpload(settings.out, note.folder, training=training)
            upload.begin(note.rank, leads=note.rank == min(settings.ranks or (0,)))
            upload.finish()
    if quiet:
        return
    if not notes and not failed:
        notices.notify(_nothing_recorded(settings, code))
    for folder in sorted({note.folder for note in notes}):
        of_it = sorted((note for note in notes if note.folder == folder), key=lambda note: note.rank)
        _report_run(folder, of_it, settings, code=code)


def record_exit(settings: Settings, *, code: int, launched_ns: int) -> None:
    """Add the command's exit to the attempts logs of the runs that a rank of this node leads."""
    leading_rank = min(settings.ranks or (0,))
    folders = {note.folder for note in read_notes(Path(settings.notes))[0] if note.rank == leading_rank}
    for folder in sorted(folder for folder in folders if (folder / conventions.ATTEMPTS_FILE).is_file()):
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else None
        try:
            attempts.append_exit(folder, launched_ns=launched_ns, failed_ns=None, code=code, reason=reason)
        except OSError as error:
            notices.notify(f"{folder}: the exit is not recorded ({error.strerror})")


def read_notes(folder: Path) -> tuple[list[Note], int]:
    """Notes of a command's recorded processes, and how many reported that they could not begin."""
    notes, failed = [], 0
    for path in sorted(folder.glob("*.json")):
        note = json.loads(regular_files.read_text(path))
        if "folder" in note:
            notes.append(Note(**{**note, "folder": Path(note["folder"])}))
        else:
            failed += 1
    return notes, failed


def request_window(settings: Settings) -> None:
    """Request a window from the running trainings, and end their injected delays."""
    for folder in {note.folder for note in read_notes(Path(settings.notes))[0] if not note.ended}:
        if settings.perturb:
            (folder / conventions.PERTURB_STOP_FILE).touch()
        (folder / conventions.NOW_FILE).touch()


def print_hang(folder: Path) -> None:
    """Print the diagnosis of a folder of dumps on stderr, if this Python can make it: stdout is the training's."""
    if has_analysis():
        command = python_child.module_command("tracekit", "hang", str(folder), "--min-wait", "0")
        subprocess.run(command, stdout=sys.stderr, check=False, env=python_child.environment())  # noqa: S603 our own


def has_analysis() -> bool:
    """Return whether this Python can check runs."""
    return all(importlib.util.find_spec(name) for name in _NEEDED_TO_CHECK)


def print_check(folder: "Path | str") -> None:
    """Print the output of ``tracekit check`` on stderr: stdout is the training's."""
    sys.stderr.flush()
    check = python_child.module_command("tracekit", "check", str(folder), "--fail-on", "never")
    subprocess.run(check, stdout=sys.stderr, check=False, env=python_child.environment())  # noqa: S603 our own


def _report_run(folder: Path, notes: list[Note], settings: Settings, *, code: int) -> None:
    for note in notes:
        if not note.ended:
            steps = _steps(folder, note)
            after = f", after at least {steps} steps" if steps else ""  # an uploaded log is no longer here
            notices.notify(f"rank {note.rank} was killed while recording{after}; complete files remain")
    place: Path | str = folder
    if object_storage.is_url(settings.out):
        target = uploader.target_file(folder)  # missing where nothing was uploaded
        place = regular_files.read_text(target) if target.is_file() else settings.out
    traced = _traced_ranks(place, (note.rank for note in notes))
    path = _display_path(folder) if isinstance(place, Path) else place
    if not traced:
        if all(note.ended for note in notes):
            notices.notify(f"{_nothing_profiled(settings, notes)}; metrics are in {path}")
        return
    notices.notify(f"recorded {_named_ranks(traced)} in {path}")
    if min(note.rank for note in notes) > min(settings.ranks or (0,)):
        return  # the leading rank is on another node, which reports the rest
    ranks = set(range(notes[0].world_size) if settings.ranks is None else settings.ranks)
    deadline = time.monotonic() + _OTHERS_WAIT_S
    while code == 0 and time.monotonic() < deadline and len(_traced_ranks(place, ranks)) < len(ranks):
        time.sleep(0.2 if isinstance(place, Path) else 2.0)  # for other nodes' traces
    if has_analysis():
        print_check(place)
    dashboard = f", tracekit dashboard {_display_path(folder.parent)}" if isinstance(place, Path) else ""
    notices.notify(f"next: tracekit check {path}{dashboard}")


def _nothing_recorded(settings: Settings, code: int) -> str:
    if code:
        how = f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
        return f"nothing was recorded: the command {how} before a torch optimizer took a step"
    if settings.ranks is not None:
        return f"nothing was recorded: no torch optimizer took a step on ranks {', '.join(map(str, settings.ranks))}"
    return (
        "nothing was recorded: no torch optimizer took a step, or the launcher did not pass PYTHONPATH and "
        f"{conventions.RECORD_VARIABLE} on"
    )


def _nothing_profiled(settings: Settings, notes: list[Note]) -> str:
    steps = max(note.steps for note in notes)
    if settings.steps is None:
        reason = "no slow steps recurred or lasted" if settings.on_outlier else "no window was requested"
        return f"{reason}: nothing was profiled"
    first, end = parse_steps(settings.steps)
    if steps > first:
        return f"steps {first} to {min(end, steps) - 1} were not recorded completely: nothing was profiled"
    fitting = f"; try --steps {max(1, steps // 2)}:{steps}" if steps > 1 else ""
    return f"the training ended after {steps} steps, before step {first}: nothing was profiled{fitting}"


def _traced_ranks(run: "Path | str", ranks: Iterable[int]) -> list[int]:
    name = {rank: conventions.rank_file(rank, conventions.TRACE_SUFFIX) for rank in ranks}
    if isinstance(run, str):
        try:
            system, path = object_storage.connect(run)
            paths = object_storage.call_with_retries(run, lambda: system.find(path))
        except object_storage.StorageError as error:
            notices.notify(str(error))
            return []
        present = {str(path).rsplit("/", 1)[-1] for path in paths}
        return [rank for rank in name if name[rank] in present]
    return [rank for rank in name if (run / name[rank]).exists() or next(run.glob(f"*/{name[rank]}"), None)]


def _steps(folder: Path, note: Note) -> int:
    log = folder / (conventions.rank_file(note.rank, conventions.METRICS_SUFFIX) + conventions.PARTIAL_SUFFIX)
    try:
        last = regular_files.read_text(log).rstrip().rpartition("\n")[2]
        return max(note.steps, int(json.loads(last)["step"]) + 1)
    except (OSError, ValueError, KeyError, TypeError):
        return note.steps


def _named_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def _display_path(folder: Path) -> str:
    cwd = Path.cwd()
    return str(folder.relative_to(cwd)) if folder.is_relative_to(cwd) else str(folder)
