"""What a rank does by its stacks, what makes it a culprit, and the evidence for it."""

import re
from dataclasses import dataclass
from enum import StrEnum

from tracekit.analysis.hangs.collectives import sizes
from tracekit.model.hang_dump import Call, CallState, Frame, HangDumps, RankDump, SystemCall, ThreadStack
from tracekit.model.units import duration

_BUSY_RATIO = 0.5
_COMMUNICATION = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py",
                  "torch/distributed/nn/functional.py", "torch/distributed/rendezvous.py")  # fmt: skip
_QUERIES = ("get_", "is_")
_DATA = ("torch/utils/data/", "/torchdata/", "/webdataset/", "/datasets/", "/streaming/base/", "/grain/", "/ffcv/")
_FILES = ("torch/serialization.py", "/safetensors/", "torch/distributed/checkpoint/", "/fsspec/", "/shutil.py",
          "/gzip.py", "/zipfile", "/pathlib.py", "/tempfile.py")  # fmt: skip
_LIBRARIES = (
    "/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<string>", "/tracekit/capture/",
    "/torch/distributed/", "/torch/nn/", "/torch/autograd/", "/torch/optim/", "/torch/utils/", "/torch/_",
)  # fmt: skip
"""Parts of paths that are no user's code, also of packages that were installed from a folder (editable)."""
_INSTALLED = ("/site-packages/", "/dist-packages/")
_FRAMEWORK = ("-packages/torch/", "/tracekit/capture/")
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


_FRAMES = 6
_STANDARD_LIBRARY = ("/lib/python3", "<frozen ")
_SOURCE_PREFIX = re.compile(r"\[/[^\]]*\] ")
_LOST_CONNECTION = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited",
                    "connection was likely closed", "nccl remote error")  # fmt: skip


class Kind(StrEnum):
    """Causes of a hang."""

    NONE = "no hang"
    DIED = "process died"
    NO_DUMP = "no dump"
    EXITED = "program ended"
    ERROR = "exception"
    HOST = "stuck on the host"
    MISMATCH = "mismatched collectives"
    ORDER = "order of collectives"
    DEADLOCK = "deadlock between groups"
    MESSAGES = "deadlock of sends and receives"
    COMMUNICATION = "communication stuck"
    COMMUNICATOR = "communicator not created"
    UNKNOWN = "cause unknown"


ADVICE = {
    Kind.NONE: "",
    Kind.DIED: "Look for the end of that process: its log, the kernel's log (dmesg) for the out-of-memory killer, and "
    "the GPU's (nvidia-smi -q, Xid errors).",
    Kind.NO_DUMP: "Look whether that process is alive (py-spy dump --pid PID) and put its dump into the folder; if it "
    "is gone, its log and the kernel's log (dmesg) say why.",
    Kind.EXITED: "Give all ranks the same number of steps: drop_last, or torch.distributed.algorithms.Join.",
    Kind.ERROR: "Fix the exception; the other ranks only wait for that rank.",
    Kind.HOST: "Look at the code in the stack of that rank: the other ranks continue when it returns.",
    Kind.MISMATCH: "All ranks of a group have to call the same operation with equally many elements of one type: look "
    "for a condition on rank or data before the call; where a rank has fewer batches, drop_last or "
    "torch.distributed.algorithms.Join.",
    Kind.ORDER: "Call the collectives in one order on all ranks of the group; look for a condition on rank or data.",
    Kind.DEADLOCK: "Call the collectives of these groups in one order on all ranks that belong to both.",
    Kind.MESSAGES: "Compare peers and order of the sends and receives of these ranks: nobody sends what they wait for.",
    Kind.COMMUNICATION: "All ranks are in the collective: look at network and GPUs (NCCL_DEBUG=INFO, nvidia-smi, "
    "ibstat), first on ranks that have not started or completed it.",
    Kind.COMMUNICATOR: "Call the first collectives of these groups in one order on all ranks; tracekit record "
    "--hang-timeout records the group of each rank's call.",
    Kind.UNKNOWN: "Add the missing dumps, and stacks of all ranks (py-spy dump --pid PID > rank3.txt).",
}

HOST_ADVICE = {
    Activity.DATA_LOADER: "Look at the dataset and the data loader's workers (py-spy dump --pid of the worker "
    "processes); DataLoader(timeout=60) turns such a wait into an error.",
    Activity.FILE_ACCESS: "Check that file system on the rank's node: df, dmesg, the mount and its server.",
    Activity.RUNNING: "Look at the loop in the stack of that rank: it does not end.",
    Activity.SLEEPING: "Look at what the rank sleeps for: the other ranks continue when it returns.",
}


@dataclass(frozen=True)
class Culprit:
    """A rank that causes a hang."""

    rank: int
    kind: Kind
    reason: str
    """A predicate, such as "is blocked in file access"."""
    evidence: tuple[str, ...]
    activity: Activity = Activity.UNKNOWN

    @property
    def advice(self) -> str:
        """Advice on the culprit."""
        return HOST_ADVICE.get(self.activity, ADVICE[self.kind]) if self.kind is Kind.HOST else ADVICE[self.kind]


def of_rank(rank: int, dumps: HangDumps) -> Culprit:
    """Return why a rank that others wait for does not come."""
    dump = dumps.ranks.get(rank)
    if dump is None or (not dump.has_recorder and not dump.threads):
        return _without_dump(rank, dumps)
    if dump.reason == "exit":
        return Culprit(rank, Kind.EXITED, "ended its program", record(dump))
    if dump.reason == "error":
        return Culprit(rank, Kind.ERROR, f"raised {error_line(dump.error)}", evidence(dump))
    host_state = state(dump)
    if not dump.has_recorder and host_state.activity is Activity.COMMUNICATION:
        reason = f"{host_state.sentence}; which one is unknown, as its flight recorder dump is missing"
        return Culprit(rank, Kind.UNKNOWN, reason, evidence(dump))
    if host_state.activity is Activity.UNKNOWN:
        reason = "has not called it; the dumps have no stack of it"
    else:
        reason = host_state.sentence
    return Culprit(rank, Kind.HOST, reason, evidence(dump), host_state.activity)


def _without_dump(rank: int, dumps: HangDumps) -> Culprit:
    witnesses = [other for other, dump in dumps.ranks.items() if rank in dump.dead_ranks]
    if witnesses:
        text = f"rank {witnesses[0]} found on the same host that its process does not exist any more"
        return Culprit(rank, Kind.DIED, "died: its process does not exist any more", (text, "it left no dump"))
    lost = [(other, dump.error) for other, dump in dumps.ranks.items() if is_lost_connection(dump.error)]
    if lost:
        texts = tuple(f"rank {other}: {error_line(error)}" for other, error in lost[:3])
        return Culprit(rank, Kind.DIED, "died: the others lost the connection to it", (*texts, "it left no dump"))
    return Culprit(rank, Kind.NO_DUMP, "left no dump: its process ended or died, or was too busy to write one", ())


def is_lost_connection(error: str) -> bool:
    """Return whether an error says that another process has gone."""
    return any(words in error.lower() for words in _LOST_CONNECTION)


def evidence(dump: RankDump) -> tuple[str, ...]:
    """Last calls of a rank, the state of its main thread and its stack."""
    texts = list(record(dump))
    thread = dump.main_thread
    if thread is not None and thread.frames:
        if thread.cpu_ratio is not None and thread.cpu_ratio > 0.01:
            texts.append(f"its main thread runs, or waits for a processor, {100 * thread.cpu_ratio:.0f}% of the time")
        if thread.system_call is not None:
            call = thread.system_call
            texts.append(f"its main thread is in the system call {call.name}{f' on {call.path}' if call.path else ''}")
        texts += [f"stack: {_frame_text(frame)}" for frame in _shown(thread.frames)]
    return tuple(texts)


def _shown(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the innermost frame, and its callers outside of the standard library."""
    callers = (
        frame
        for frame in frames[1:]
        if "/site-packages/" in frame.file or not any(part in frame.file for part in _STANDARD_LIBRARY)
    )
    return (*frames[:1], *callers)[:_FRAMES]


def _frame_text(frame: Frame) -> str:
    return f"{frame}{f': {frame.source}' if frame.source else ''}"


def record(dump: RankDump) -> tuple[str, ...]:
    """Return the last calls of a rank, and for how long it made none."""
    texts = []
    if dump.calls:
        texts.append(f"last call: {call_text(dump.calls[-1])}")
        done = [call for call in dump.calls if call.state is CallState.COMPLETED]
        if done and done[-1] is not dump.calls[-1]:
            texts.append(f"last complete: {call_text(done[-1])}")
    elif dump.has_recorder:
        texts.append("its flight recorder has no call")
    if dump.stalled_ns:
        texts.append(f"no progress for {duration(dump.stalled_ns)} when the dump was written")
    return tuple(texts)


def call_text(call: Call) -> str:
    """Return a call for a message: operation, group, number, sizes, state and where it was called."""
    frame = user_frame(call.frames)
    where = f", called in {frame}" if frame else ""
    what = " ".join(filter(None, (call.op, sizes(call))))
    state = call.state.value if call.is_recorded else "the host is in it, and no flight recorder has it"
    return f"{what} of group {call.group!r}, seq {call.seq}, {state}{where}"


def error_line(error: str) -> str:
    """Return an error on one line, without the place in torch's source."""
    return _SOURCE_PREFIX.sub("", " ".join(error.split()))[:200] or "an exception"


def brief(call: Call) -> str:
    """Return a call for a table."""
    return f"{call.op} {call.group}/{call.seq}"


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
    """The innermost frame that is no library's; of an installed program that of its package; else the innermost.

    A program that is installed has all its code among the libraries, except for the script that starts it.
    """
    user_frames = (
        frame
        for frame in frames
        if not any(part in frame.file for part in _LIBRARIES)
        and not (frame.function == "<module>" and "/bin/" in frame.file)
    )
    installed = (
        frame
        for frame in frames
        if any(part in frame.file for part in _INSTALLED) and not any(part in frame.file for part in _FRAMEWORK)
    )
    return next(user_frames, next(installed, frames[0] if frames else None))


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
