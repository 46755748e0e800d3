"""What a rank's main thread does on the host, by its stack and by the system call that it is in."""

from dataclasses import dataclass
from enum import StrEnum

from tracekit.model.hang_dump import Frame, RankDump, SystemCall, ThreadStack

_BUSY_RATIO = 0.5
_COMMUNICATION = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py",
                  "torch/distributed/nn/functional.py", "torch/distributed/rendezvous.py")  # fmt: skip
_QUERIES = ("get_", "is_")
_DATA = ("torch/utils/data/", "/torchdata/", "/webdataset/", "/datasets/", "/streaming/base/", "/grain/", "/ffcv/")
_FILES = ("torch/serialization.py", "/safetensors/", "torch/distributed/checkpoint/", "/fsspec/", "/shutil.py",
          "/gzip.py", "/zipfile", "/pathlib.py", "/tempfile.py")  # fmt: skip
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<string>", "/tracekit/capture/")
_FILE_CALLS = frozenset({
    "open", "openat", "openat2", "read", "pread64", "readv", "preadv", "preadv2", "write", "pwrite64", "writev",
    "pwritev", "fsync", "fdatasync", "sync", "syncfs", "stat", "lstat", "fstat", "newfstatat", "statx", "getdents64",
    "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "close", "flock", "fcntl", "ftruncate",
    "fallocate", "sendfile", "copy_file_range", "access",
})  # fmt: skip
_SLEEPS = frozenset({"nanosleep", "clock_nanosleep"})
_NO_FILES = ("socket:", "pipe:", "anon_inode:", "/memfd:")


class Activity(StrEnum):
    """What a thread does."""

    COMMUNICATION = "communication"
    DATA_LOADER = "data loader"
    FILE_ACCESS = "file access"
    RUNNING = "running"
    SLEEPING = "sleeping"
    HOST = "host code"
    UNKNOWN = "unknown"


BLOCKING = frozenset({Activity.DATA_LOADER, Activity.FILE_ACCESS, Activity.SLEEPING})
"""What keeps a rank from its collectives whatever else it has enqueued."""


@dataclass(frozen=True)
class HostState:
    """What the main thread does, and where."""

    activity: Activity
    frame: Frame | None = None
    """The innermost frame of the user's code."""
    path: str = ""
    """The file that is read, written or opened."""
    operation: str = ""
    """The function of torch.distributed that the user's code called; "" if it is in none."""

    @property
    def sentence(self) -> str:
        """Activity of the rank, as a predicate."""
        where = f" in {self.frame.brief}" if self.frame else ""
        text = {
            Activity.COMMUNICATION: f"is in a call of torch.distributed{where}",
            Activity.DATA_LOADER: f"waits for its data loader{where}",
            Activity.FILE_ACCESS: f"is blocked in access to {self.path or 'a file'}{where}",
            Activity.RUNNING: f"runs code on the host{where}",
            Activity.SLEEPING: f"sleeps{where}",
            Activity.HOST: f"is on the host{where}",
            Activity.UNKNOWN: "has no stack in the dumps",
        }[self.activity]
        if self.activity is Activity.DATA_LOADER and self.path:
            text += f", which accesses {self.path}"
        return text


def state(dump: RankDump) -> HostState:
    """State of a rank's main thread."""
    thread = dump.main_thread
    if thread is None or not thread.frames:
        return HostState(Activity.UNKNOWN)
    path = _accessed_file(thread.system_call)
    activity = _activity(thread, path)
    operation = _operation(thread.frames) if activity is Activity.COMMUNICATION else ""
    return HostState(activity, user_frame(thread.frames), path or "", operation)


def user_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost frame that is no library's; the innermost of all, if there is none."""
    user_frames = (frame for frame in frames if not any(part in frame.file for part in _LIBRARIES))
    return next(user_frames, frames[0] if frames else None)


def _activity(thread: ThreadStack, path: str | None) -> Activity:
    frames, call = thread.frames, thread.system_call
    operation = _operation(frames)
    if operation and not operation.startswith(_QUERIES):
        return Activity.COMMUNICATION
    if _within(frames, _DATA):
        return Activity.DATA_LOADER
    if path is not None or _within(frames[:4], _FILES):
        return Activity.FILE_ACCESS
    if call is not None and call.name in _SLEEPS:
        return Activity.SLEEPING
    if thread.cpu_ratio is not None and thread.cpu_ratio >= _BUSY_RATIO:
        return Activity.RUNNING
    return Activity.HOST


def _operation(frames: tuple[Frame, ...]) -> str:
    """Return the outermost function of torch.distributed in a stack."""
    calls = [frame.function for frame in frames if any(part in frame.file for part in _COMMUNICATION)]
    return calls[-1] if calls else ""


def _within(frames: tuple[Frame, ...], parts: tuple[str, ...]) -> bool:
    return any(part in frame.file for frame in frames for part in parts)


def _accessed_file(call: SystemCall | None) -> str | None:
    """Return the file of a system call that accesses files; None for any other, and for sockets and pipes."""
    if call is None or call.name not in _FILE_CALLS or call.path.startswith(_NO_FILES):
        return None
    return call.path


def may_wait_in(state: HostState, backend: str) -> bool:
    """Return whether a rank with a pending collective may be waiting for it.

    A rank that enqueued a collective may be anywhere on the host. Waiting for a GPU, a thread runs on its processor;
    waiting for gloo it does not.
    """
    if state.activity is Activity.RUNNING:
        return backend != "gloo"
    return state.activity not in BLOCKING
