"""``python -m tracekit.capture.uploader``: the process that uploads what one rank records, so that no training waits.

It reads lines of JSON on stdin: {"file": PATH} for a complete file in the staging folder. At the line "finish", at the
end of stdin, or when the recording process has died, it uploads what is left of this rank's files and exits: with 0 if
all are uploaded, else with 1 and a line on stderr. Uploaded traces are removed from the staging folder.
"""

import argparse
import contextlib
import json
import os
import queue
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.capture import notices
from tracekit.conventions import object_storage, python_child, regular_files
from tracekit.conventions.object_storage import StorageError

FINISH = "finish"
_POLL_S = 1.0
_MAX_FOLDERS = 1000
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl")
_LOGS = (conventions.METRICS_SUFFIX, conventions.CHECKPOINT_LOG_SUFFIX, conventions.ATTEMPTS_FILE)
_RUN_FILE = re.compile(r"rank\d{5,}\.(?!window\d+\.json).*|run\.json$|attempts\.jsonl$")
WAIT_VARIABLE = "TRACEKIT_UPLOAD_WAIT_S"
_DEFAULT_WAIT_S = 120.0
DEFAULT_STAGING_BYTES = 10 << 30
STAGING_PREFIX = "upload-"


class Uploader:
    """Uploads the files of one rank from a staging folder to the folder of the run at a URL."""

    def __init__(self, folder: Path, url: str, rank: int, *, training: "str | None", leads: bool) -> None:
        self._folder = folder
        self._url = url.rstrip("/")
        self._rank = rank
        self._training = training
        self._leads = leads
        self._target: str | None = None
        self._waiting: list[Path] = []
        self._has_reported = False

    def upload(self, path: Path) -> None:
        """Upload a file, after those that failed before. A failure is reported once; the next call tries again."""
        error = self._upload_all([*self._waiting, path])
        if error is not None and not self._has_reported:
            self._has_reported = True
            notices.notify(
                f"rank {self._rank}: {self._waiting[0].name} is not uploaded yet: {error}; training continues"
            )

    def finish(self) -> bool:
        """Upload the rest; report what could not be uploaded, and return whether that is nothing."""
        # This rank's complete files, and its logs also while they are written.
        start = conventions.rank_file(self._rank, ".")
        files = [path for path in sorted(self._folder.rglob("rank*")) if path.name.startswith(start) and path.is_file()]
        files = [path for path in files if _RUN_FILE.match(path.name)]
        files = [path for path in files if self._is_log(path) or not path.name.endswith(conventions.PARTIAL_SUFFIX)]
        of_run = [self._folder / name for name in (conventions.MANIFEST_FILE, conventions.ATTEMPTS_FILE)]
        files += [path for path in of_run if self._leads and path.is_file()]
        error = self._upload_all(files)
        for path in set(files) - set(self._waiting):
            path.unlink(missing_ok=True)  # logs and the manifest, which stay until now
        if error is not None:
            notices.notify(
                f"rank {self._rank}: {len(self._waiting)} files are not uploaded ({error}); they are in "
                f"{self._folder}: copy them to {object_storage.shown(self._target or self._url)}"
            )
            return False
        if not any(_RUN_FILE.match(path.name) for path in self._folder.rglob("*") if path.is_file()):
            shutil.rmtree(self._folder, ignore_errors=True)  # no other rank has files there
        return True

    def _upload_all(self, paths: "list[Path]") -> "OSError | None":
        """Upload files and return the last error; those that failed wait. After one that may pass, the rest waits."""
        last: OSError | None = None
        self._waiting = []
        for path in dict.fromkeys(paths):
            if isinstance(last, StorageError) and last.kind in object_storage.TRANSIENT:
                self._waiting.append(path)
                continue
            try:
                self._upload(path)
            except OSError as error:  # StorageError is one
                last = error
                self._waiting.append(path)
        return last

    def _upload(self, path: Path) -> None:
        target = (
            f"{self._run_url()}/{path.relative_to(self._folder).as_posix().removesuffix(conventions.PARTIAL_SUFFIX)}"
        )
        if not path.is_file():  # a log has got its final name, or the file is uploaded
            return
        if self._is_log(path):
            content = regular_files.read_bytes(path)
            content = content[: content.rfind(b"\n") + 1]  # up to the end of the last complete line
            object_storage.call_with_retries(target, lambda: _put(target, content))
        else:
            object_storage.call_with_retries(target, lambda: _put(target, path))
            if path.name != conventions.MANIFEST_FILE:
                path.unlink(missing_ok=True)

    def _run_url(self) -> str:
        """URL of the run: with a training's name, the first of URL, URL-2, … that is free or its own."""
        if self._target is None:
            self._target = self._url if self._training is None else self._claim_url(self._training)
            if self._training is not None:  # the launcher waits for it
                with contextlib.suppress(OSError):
                    target_file(self._folder).write_text(self._target, encoding="utf-8")
        return self._target

    def _claim_url(self, training: str) -> str:
        for number in range(1, _MAX_FOLDERS):
            url = self._url if number == 1 else f"{self._url}-{number}"
            owner = _owner(url)
            if owner is None:
                if not object_storage.call_with_retries(url, lambda url=url: _has_files(url)):  # type: ignore[misc]
                    claim = f"{url}/{conventions.CLAIM_FILE}"
                    object_storage.call_with_retries(claim, lambda claim=claim: _create(claim, training.encode()))  # type: ignore[misc]
                owner = _owner(url)  # files may be those of a rank that has claimed the folder meanwhile
            if owner == training:
                return url
        raise StorageError(f"{self._url} to {self._url}-{_MAX_FOLDERS - 1} are all in use", kind=object_storage.OTHER)

    def _is_log(self, path: Path) -> bool:
        return path.name.removesuffix(conventions.PARTIAL_SUFFIX).endswith(_LOGS)


def target_file(folder: Path) -> Path:
    """File next to a staging folder that states the URL of its run."""
    return folder.with_name(f"{folder.name}.url")


def main(words: "list[str]") -> int:
    """Upload what the lines on stdin name; return the exit code."""
    parser = argparse.ArgumentParser(prog="tracekit.capture.uploader")
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--training")
    parser.add_argument("--leads", action="store_true")
    options = parser.parse_args(words)
    uploader = Uploader(options.folder, options.url, options.rank, training=options.training, leads=options.leads)
    with contextlib.suppress(OSError):
        os.nice(10)
    work: queue.Queue[Path | None] = queue.Queue()
    thread = threading.Thread(target=_serve, args=(uploader, work), daemon=True)
    thread.start()
    for line in _lines(options.parent):
        if line == FINISH:
            break
        work.put(Path(json.loads(line)["file"]))
    work.put(None)
    thread.join()
    return 0 if uploader.finish() else 1


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
        """Upload of a run to a URL, with a new staging folder in `scratch` or the system's folder."""
        parent = Path(scratch) if scratch is not None else Path(tempfile.gettempdir())
        return cls(url, parent / f"tracekit-upload-{uuid.uuid4().hex[:12]}")

    def begin(self, rank: int, *, leads: bool) -> None:
        """Start the uploading process. Raises OSError if it cannot be started."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        words = [str(self.folder), self.url, "--rank", str(rank), "--parent", str(os.getpid())]
        words += ["--training", self._training] if self._training is not None else []
        # This process's environment, without recording the uploading process.
        inherited = {name: value for name, value in os.environ.items() if name != conventions.RECORD_VARIABLE}
        self._process = subprocess.Popen(  # noqa: S603 a module of our own
            python_child.module_command("tracekit.capture.uploader", *words, *(["--leads"] if leads else [])),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # the training's
            env=python_child.environment(inherited),
            start_new_session=True,  # Ctrl-C ends the training, and then what it recorded is uploaded
        )

    def require_room(self) -> None:
        """Raise RuntimeError if uploads are so far behind that another window has no room in the staging folder."""
        waiting_bytes = 0
        for path in self.folder.rglob("rank*"):
            with contextlib.suppress(OSError):  # uploaded meanwhile
                waiting_bytes += path.stat().st_size if path.is_file() else 0
        if waiting_bytes > self.max_bytes:
            raise RuntimeError(
                f"uploads to {self.url} are {waiting_bytes >> 20:,} MiB behind, more than the disk budget of "
                f"{self.max_bytes >> 20:,} MiB; record windows farther apart"
            )

    def submit(self, paths: Iterable[Path]) -> None:
        """Upload those of the files that exist, soon. Raises OSError if the uploading process is gone."""
        if self._process is None or self._process.poll() is not None:
            raise BrokenPipeError(f"the process that uploads ended; files are in {self.folder}")
        _write(self._process, "".join(json.dumps({"file": str(path)}) + "\n" for path in paths if path.exists()))

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


def _serve(uploader: Uploader, work: "queue.Queue[Path | None]") -> None:
    while (path := work.get()) is not None:
        if work.empty() or path.name != conventions.MANIFEST_FILE:  # a later manifest says more
            uploader.upload(path)


def _lines(parent: int) -> Iterator[str]:
    """Yield lines of stdin until it ends or the recording process has died: forked workers keep its end open."""
    received = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], _POLL_S)[0]:
            continue
        block = os.read(0, 1 << 16)
        if not block:
            return
        *lines, received = (received + block).split(b"\n")
        yield from (line.decode() for line in lines)


def _owner(url: str) -> "str | None":
    claim = f"{url}/{conventions.CLAIM_FILE}"
    system, path = object_storage.connect(claim)
    try:
        return str(object_storage.call_with_retries(claim, lambda: system.cat_file(path)).decode())
    except StorageError as error:
        if error.kind == object_storage.MISSING:
            return None
        raise


def _has_files(url: str) -> bool:
    system, path = object_storage.connect(url)
    try:
        return bool(system.ls(path, detail=False))
    except FileNotFoundError:
        return False


def _create(url: str, content: bytes) -> None:
    """Write an object unless it exists; the other writer's content stays."""
    system, path = _writable(url)
    with contextlib.suppress(FileExistsError):
        system.pipe_file(path, content, mode="create")


def _put(url: str, content: "bytes | Path") -> None:
    system, path = _writable(url)
    if isinstance(content, Path):
        system.put_file(str(content), path)
    else:
        system.pipe_file(path, content)


def _writable(url: str) -> "tuple[Any, str]":
    """File system of a URL and the path in it, its folder made where the file system has folders."""
    system, path = object_storage.connect(url)
    if object_storage.protocol(url) not in _OBJECT_STORES:  # these would make a bucket
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
    return system, path


def _write(process: "subprocess.Popen[bytes]", text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text.encode())
    process.stdin.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
