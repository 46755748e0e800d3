"""Hangs of a command: the variables that turn torch's flight recorder on, and the report at the end."""

import contextlib
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from tracekit import conventions
from tracekit.capture import notices
from tracekit.capture.launch_settings import Settings
from tracekit.capture.launcher import exit_report
from tracekit.conventions import python_child

_NCCL_PREFIX = "nccl_trace_rank_"
_EXIT = "exit"


def recorder_variables(settings: Settings) -> dict[str, str]:
    """Return the variables of torch's flight recorder; those that the user has set come first.

    The recorder of NCCL also writes a dump itself, when its own timeout ends a collective.
    """
    prefix = str(Path(settings.scratch, _NCCL_PREFIX))
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # its name before torch 2.8
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
    }


def report(settings: Settings, *, quiet: bool) -> None:
    """Remove what ranks left that did not hang; report the hang of others."""
    if settings.hang_timeout_s is None:
        return
    notes = Path(settings.notes).glob(f"*{conventions.HANG_NOTE_SUFFIX}")
    for folder in sorted({Path(note.read_text(encoding="utf-8")) for note in notes}):
        for dump in sorted(Path(settings.scratch).glob(f"{_NCCL_PREFIX}*")):
            shutil.move(dump, folder / dump.name)
        if not _has_hung(folder):
            _remove(folder)
        elif not quiet:
            _print(folder)


def _has_hung(folder: Path) -> bool:
    """Return whether a rank left a dump of something else than the end of its program."""
    dumps = list(folder.glob(f"rank*{conventions.HANG_SUFFIX}"))
    return any(_reason(dump) != _EXIT for dump in dumps) or any(folder.glob(f"{_NCCL_PREFIX}*"))


def _reason(dump: Path) -> str:
    try:
        return str(json.loads(dump.read_text(encoding="utf-8"))["tracekit"]["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _remove(folder: Path) -> None:
    """Remove the files of ranks on this node, and folders that are empty then."""
    with contextlib.suppress(OSError):
        for stacks in folder.glob(f"rank*{conventions.STACKS_SUFFIX}"):
            process = json.loads(stacks.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
            if process.get("host") == platform.node():
                name = stacks.name.removesuffix(conventions.STACKS_SUFFIX)
                (folder / (name + conventions.HANG_SUFFIX)).unlink(missing_ok=True)
                stacks.unlink()
        folder.rmdir()
        run = folder.parent
        if [path.name for path in run.iterdir()] == [conventions.CLAIM_FILE]:
            (run / conventions.CLAIM_FILE).unlink()
            run.rmdir()


def _print(folder: Path) -> None:
    """Print the diagnosis on stderr, if this Python can make it: stdout is the training's."""
    notices.notify(f"the training hung or failed; next: tracekit hang {folder}")
    if exit_report.has_analysis():
        command = python_child.module_command("tracekit", "hang", str(folder), "--min-wait", "0")
        subprocess.run(command, stdout=sys.stderr, check=False, env=python_child.environment())  # noqa: S603 our own
