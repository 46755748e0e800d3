"""Which folder a training records into: all its ranks the same one, another training never that one."""

import time
from pathlib import Path

from tracekit import conventions

_MAX_FOLDERS = 1000
_PATIENCE_S = 2.0


def claim(out: Path, training: str) -> Path:
    """Return the folder for `training`, a name that its ranks share: `out`, else ``out-2``, ``out-3``, ….

    A folder is free if it is empty or does not exist. It is then marked as this training's: ranks on other nodes find
    it, and other trainings skip it. Raises OSError where none can be written.
    """
    for number in range(1, _MAX_FOLDERS):
        folder = out if number == 1 else out.with_name(f"{out.name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / conventions.CLAIM_FILE
        present = [path.name for path in folder.iterdir()]
        if mark.name not in present and present:
            continue  # a run without a claim
        if mark.name not in present and _try_create(mark, training):
            return folder
        if owner(folder) == training:
            return folder
    raise FileExistsError(f"{out} to {out.name}-{_MAX_FOLDERS - 1} are all in use")


def owner(folder: Path) -> str | None:
    """Return the name of the training that claimed a folder; None if none did."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            text = (folder / conventions.CLAIM_FILE).read_text(encoding="utf-8")
        except OSError:
            return None
        if text or time.monotonic() > deadline:  # empty between creation and writing
            return text or None
        time.sleep(0.01)


def _try_create(mark: Path, training: str) -> bool:
    try:
        with mark.open("x", encoding="utf-8") as file:
            file.write(training)
    except FileExistsError:
        return False
    return True
