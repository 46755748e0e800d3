"""Upload a rank's part of a run to a URL while the training continues."""

import contextlib
import json
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from tracekit import conventions
from tracekit.capture.uploader import FINISH
from tracekit.conventions import python_child

WAIT_VARIABLE = "TRACEKIT_UPLOAD_WAIT_S"
_DEFAULT_WAIT_S = 120.0
DEFAULT_STAGING_BYTES = 10 << 30
STAGING_PREFIX = "upload-"


class RunUpload:
    """A run at a URL: its staging folder, from which a process of its own uploads complete files.

    All ranks of a training upload to the same folder: with a `training`, a name that they share, the first of URL,
    URL-2, … that is free or theirs. Files stay in the staging folder until they are uploaded.
    """

    def __init__(self, url: str, folder: Path, *, training: "str | None" = None) -> None:
        self.url = url
        self.folder = folder
        self.max_bytes = DEFAULT_STAGING_BYTES
        self._training = training
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def to(cls, url: str, scratch: "str | os.PathLike[str] | None") -> "RunUpload":
        """Return the upload of a run to a URL, with a new staging folder in `scratch` or the system's folder."""
        parent = Path(scratch) if scratch is not None else Path(tempfile.gettempdir())
        return cls(url, parent / f"tracekit-upload-{uuid.uuid4().hex[:12]}")

    def begin(self, rank: int, *, leads: bool) -> None:
        """Start the uploading process. Raises OSError if it cannot be started."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        words = [str(self.folder), self.url, "--rank", str(rank), "--parent", str(os.getpid())]
        words += ["--training", self._training] if self._training is not None else []
        self._process = subprocess.Popen(  # noqa: S603 a module of our own
            python_child.module_command("tracekit.capture.uploader", *words, *(["--leads"] if leads else [])),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # the training's
            env=_environment(),
            start_new_session=True,  # Ctrl-C ends the training, and then what it recorded is uploaded
        )

    def require_room(self) -> None:
        """Raise RuntimeError if uploads are so far behind that another window has no room in the staging folder."""
        waiting_bytes = sum(size for path, size in _sizes(self.folder) if path.name.startswith("rank"))
        if waiting_bytes > self.max_bytes:
            raise RuntimeError(
                f"uploads to {self.url} are {waiting_bytes >> 20:,} MiB behind, more than the disk budget of "
                f"{self.max_bytes >> 20:,} MiB; record windows farther apart"
            )

    def submit(self, paths: Iterable[Path]) -> None:
        """Upload those of the files that exist, soon. Raises OSError if the uploading process is gone."""
        self._send("".join(json.dumps({"file": str(path)}) + "\n" for path in paths if path.exists()))

    def finish(self, environment: Mapping[str, str] = os.environ) -> None:
        """Upload the rest, and wait for it up to a limit. Raises TimeoutError if that is not enough."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            _write(process, FINISH + "\n")
        wait_s = float(environment.get(WAIT_VARIABLE) or _DEFAULT_WAIT_S)
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"after {wait_s:g} s the upload to {self.url} continues in process {process.pid}; "
                f"files that are not uploaded are in {self.folder}"
            ) from None

    def _send(self, lines: str) -> None:
        if self._process is None or self._process.poll() is not None:
            raise BrokenPipeError(f"the process that uploads ended; files are in {self.folder}")
        _write(self._process, lines)


def _write(process: "subprocess.Popen[bytes]", text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text.encode())
    process.stdin.flush()


def _environment() -> "dict[str, str]":
    """Return the environment of the uploading process: this one's, without recording it."""
    inherited = {name: value for name, value in os.environ.items() if name != conventions.RECORD_VARIABLE}
    return python_child.environment(inherited)


def _sizes(folder: Path) -> "Iterable[tuple[Path, int]]":
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # uploaded meanwhile
            yield path, path.stat().st_size if path.is_file() else 0
