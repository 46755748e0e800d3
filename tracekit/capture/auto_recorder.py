"""The recorder that `tracekit record` injects into each Python process; the script needs no change.

It wraps the few torch functions that every training calls (optimizer step, backward, data loader) and drives the same
`Recorder` that a training may call itself. A process without an optimizer step is not recorded.
"""

import atexit
import contextlib
import functools
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tracekit import conventions
from tracekit.capture import atomic_files, launch_settings, notices, rank_info, uploader
from tracekit.capture.checkpoints import auto_recording
from tracekit.capture.step_inference import StepCounter
from tracekit.conventions import object_storage

if TYPE_CHECKING:
    from tracekit.capture.recorder import Recorder
    from tracekit.capture.uploader import RunUpload

_SHARED_KEY = "tracekit/training"


def on_import(module: str) -> None:
    """Handle the script's import of a module; torch's import installs the recorder."""
    if module == "torch":
        settings = launch_settings.from_environment(os.environ)
        if settings is None:
            return
        _recorders.append(AutoRecorder(settings))
        _recorders[0].install()
        if settings.hang_timeout_s is not None:
            _watch_hangs(settings)
    for agent in _recorders:
        _WATCHES[module](agent.folder, agent.rank, agent.step)


_WATCHES = {
    "torch": auto_recording.watch_torch_files,
    "torch.distributed.checkpoint": auto_recording.watch_distributed_checkpoints,
    "safetensors.torch": auto_recording.watch_safetensors,
}
_recorders: "list[AutoRecorder]" = []


def _watch_hangs(settings: launch_settings.Settings) -> None:
    """Watch for hangs from the creation of the process group on; what a hung rank writes goes into the run."""
    from tracekit.capture.hangs import HangWatch

    def folder() -> Path:
        remote = object_storage.is_url(settings.out)
        run = (
            Path(settings.scratch) if remote else atomic_files.claim_folder(Path(settings.out), training_name(settings))
        )
        place = run / conventions.HANG_FOLDER
        notes = Path(settings.notes)
        if notes.is_dir():
            (notes / f"{os.getpid()}{conventions.HANG_NOTE_SUFFIX}").write_text(str(place), encoding="utf-8")
        return place

    assert settings.hang_timeout_s is not None
    HangWatch(folder, settings.hang_timeout_s).install()


class AutoRecorder:
    """Detects a training in this process and records it as `settings` say. Its failures never reach the script."""

    def __init__(self, settings: launch_settings.Settings) -> None:
        self._settings = settings
        self._on = True
        self._recorder: Recorder | None = None
        self._reset()

    def install(self) -> None:
        """Wrap the functions of torch that are observed."""
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        from tracekit.capture.profiler_session import before_foreign_profiler

        before, after = self._safe(self._before_step), self._safe(self._after_step)
        register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: before(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, _args, _kwargs: after(optimizer))
        _wrap(Optimizer, "__init__", after=self._safe(self._optimizer_made))
        _wrap(torch.Tensor, "backward", around=self._around_backward)
        _wrap(GradScaler, "scale", result=self._safe(self._keep_unscaled_loss))
        _wrap(GradScaler, "step", around=self._around_scaled_step)
        _wrap(_BaseDataLoaderIter, "__next__", around=self._around_batch)
        before_foreign_profiler(self._safe(self._end_window))
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self._close)

    def _reset(self) -> None:
        """Reset all state, as in a forked process, which shares nothing with its parent's recording."""
        self._pid = os.getpid()
        self._recorder = None
        self._step_counter = StepCounter()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._within = threading.local()
        self._stepped: list[tuple[Any, bool]] = []
        self._loop_thread = threading.get_ident()
        self._in_backward = False
        self._losses: list[Any] = []
        self._unscaled_loss: tuple[Any, Any] | None = None
        self._skipped = False

    # Called by recorded saves and loads -------------------------------------------------------------------------------

    def folder(self) -> Path | None:
        """Run's folder; None where nothing is recorded: without an optimizer yet, or on other ranks."""
        if self._on and threading.get_ident() == self._loop_thread:
            self._safe(self._begin)()  # a load comes before the first step
        return self._recorder.folder if self._recorder is not None else None

    def rank(self) -> int:
        """Rank that is recorded."""
        return self._recorder.rank if self._recorder is not None else rank_info.this_rank()

    def step(self) -> int | None:
        """Optimizer steps done; None before the recording begins."""
        return self._recorder.steps_done if self._recorder is not None else None

    # Called from the script's wrapped functions -----------------------------------------------------------------------

    def _optimizer_made(self, optimizer: Any, *_: Any) -> None:
        elements = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        self._step_counter.add_optimizer(self._number(optimizer), elements)

    def _before_backward(self, root: Any) -> None:
        self._loop_thread = threading.get_ident()
        self._begin()
        if root.numel() == 1:
            unscaled = self._unscaled_loss
            self._losses.append(unscaled[1] if unscaled is not None and unscaled[0]() is root else root.detach())

    def _around_backward(self, backward: Callable[..., Any], root: Any, *args: Any, **kwargs: Any) -> Any:
        self._safe(self._before_backward)(root)
        self._reach(conventions.BACKWARD)
        self._in_backward = True
        try:
            return backward(root, *args, **kwargs)
        finally:
            self._in_backward = False
            self._safe(self._after_backward)()

    def _after_backward(self) -> None:
        stepped, self._stepped = self._stepped, []
        for optimizer, skipped in stepped:
            self._count(optimizer, skipped=skipped)

    def _keep_unscaled_loss(self, scaled: Any, _scaler: Any, outputs: Any, *_: Any) -> None:
        # The attached loss would keep the whole autograd graph alive.
        self._unscaled_loss = (weakref.ref(scaled), outputs.detach()) if isinstance(outputs, torch.Tensor) else None

    def _before_step(self, optimizer: Any) -> None:
        if not self._in_backward:
            self._begin()
        within = self._stepping_optimizers()
        if optimizer in within:  # its last step raised
            del within[within.index(optimizer) :]
        within.append(optimizer)

    def _after_step(self, optimizer: Any) -> None:
        within = self._stepping_optimizers()
        if optimizer in within:
            del within[within.index(optimizer) :]
        if within:
            self._step_counter.nested_step(self._number(optimizer))
        else:
            self._within.stepped = True
            self._count(optimizer, skipped=False)

    def _around_scaled_step(
        self, step: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._within.stepped = False
        outcome = step(scaler, optimizer, *args, **kwargs)
        if not self._within.stepped:
            self._safe(self._count)(getattr(optimizer, "optimizer", optimizer), skipped=True)
        return outcome

    def _around_batch(self, next_batch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._recorder is None or threading.get_ident() != self._loop_thread:
            return next_batch(*args, **kwargs)
        self._reach(conventions.DATA)
        began_ns = time.perf_counter_ns()
        try:
            return next_batch(*args, **kwargs)
        finally:
            self._recorder.add_data_wait(time.perf_counter_ns() - began_ns)

    def _reach(self, place: str) -> None:
        if self._recorder is not None and not self._in_backward:
            self._recorder.reach(place)

    def _end_window(self) -> None:
        if self._recorder is not None:
            self._recorder.end_window("the training started a profiler of its own")

    # Steps and the recording ------------------------------------------------------------------------------------------

    def _count(self, optimizer: Any, *, skipped: bool) -> None:
        """Count an optimizer's step; one inside backward is counted when backward has ended.

        During backward, autograd saves each thread's state, the profiler's included, and restores it at the end.
        """
        if self._in_backward or threading.get_ident() != self._loop_thread:
            self._stepped.append((optimizer, skipped))
            return
        self._skipped |= skipped
        for _ in range(self._step_counter.step(self._number(optimizer))):
            self._end_step()

    def _end_step(self) -> None:
        if self._recorder is None:
            return
        metrics: dict[str, Any] = {}
        if self._losses:
            from tracekit.capture.metrics import PendingScalar

            # The tensors that backward was called on; their sum is copied from the device.
            losses = [loss.reshape(()) for loss in self._losses]
            metrics["loss"] = PendingScalar(losses[0] if len(losses) == 1 else torch.stack(losses).sum())
        if self._skipped:
            metrics["skipped"] = 1
        self._losses, self._skipped = [], False
        self._recorder.step(metrics, tokens=self._settings.tokens_per_step)

    def _begin(self) -> None:
        """Begin to record, unless that has happened; ranks that are not requested stay unrecorded."""
        if self._recorder is not None or not len(self._numbers):
            return
        settings, rank = self._settings, rank_info.this_rank()
        ranks = settings.ranks
        if ranks is not None and rank not in ranks:
            self._on = False
            return
        self._on = False  # for good, if what follows raises
        from tracekit.capture.recorder import Recorder

        try:
            out = _claim_run(settings)
        except OSError as error:
            self._write_note({"failed": True})
            raise OSError(f"--out {settings.out} cannot be written ({error.strerror or error})") from error
        self._recorder = Recorder(
            out,
            leads=rank == (0 if ranks is None else min(ranks)),
            device=self._device(),
            mid_step=True,
            perturb_ranks=ranks,
            manifest={"recorded_by": "tracekit record"},
            **settings.recorder_options(),
        )
        self._write_status(ended=False)
        self._recorder.__enter__()
        self._on = True
        # A forked process of multiprocessing leaves without atexit.
        from multiprocessing.util import Finalize

        Finalize(None, self._close, exitpriority=0)

    def _device(self) -> str:
        """Return cuda if the parameters are there: a machine with GPUs may still train on the CPU."""
        on_cuda = any(
            parameter.is_cuda
            for optimizer in self._numbers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        return "cuda" if on_cuda else "cpu"

    def _close(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None and os.getpid() == self._pid:
            self._on = False
            recorder.__exit__(None, None, None)
            self._recorder = recorder
            self._safe(self._write_status, always=True)(ended=True)
            self._recorder = None
            if not Path(self._settings.notes).is_dir():  # no launcher on this node cleans up
                with contextlib.suppress(OSError):
                    uploader.target_file(recorder.folder).unlink(missing_ok=True)
                    Path(self._settings.scratch).rmdir()

    def _write_status(self, *, ended: bool) -> None:
        recorder = self._recorder
        assert recorder is not None
        self._write_note(
            {
                "folder": str(recorder.folder),
                "rank": recorder.rank,
                "world_size": rank_info.this_world_size(),
                "steps": recorder.steps_done,
                "ended": ended,
            }
        )

    def _write_note(self, note: dict[str, Any]) -> None:
        """Write a note for the launcher, if it runs on this node."""
        notes = Path(self._settings.notes)
        if notes.is_dir():
            atomic_files.write_json(notes / f"{self._pid}.json", note)

    def _number(self, optimizer: Any) -> int:
        return self._numbers.setdefault(optimizer, len(self._numbers))

    def _stepping_optimizers(self) -> list[Any]:
        within: list[Any] | None = getattr(self._within, "optimizers", None)
        if within is None:
            within = self._within.optimizers = []
        return within

    def _safe(self, call: Callable[..., None], *, always: bool = False) -> Callable[..., None]:
        """Return `call` wrapped so that it never raises, and does nothing once recording is off."""

        def safe(*args: Any, **kwargs: Any) -> None:
            if not (self._on or always):
                return
            try:
                call(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 whatever fails here, the training continues
                self._on = False
                notices.report_failure("not recorded", error)

        vars(safe)["_torchdynamo_disable"] = True  # torch.compile must not trace this
        return safe


def _claim_run(settings: launch_settings.Settings) -> "Path | RunUpload":
    """Run's folder, or its upload to a URL from a folder that the ranks on this node share."""
    training = training_name(settings)
    if not object_storage.is_url(settings.out):
        return atomic_files.claim_folder(Path(settings.out), training)
    from tracekit.capture.uploader import STAGING_PREFIX, RunUpload

    return RunUpload(settings.out, Path(settings.scratch, STAGING_PREFIX + training), training=training)


def training_name(settings: launch_settings.Settings) -> str:
    """Name that all ranks of this training share and no other training has.

    The ranks agree through the process group's store, without waiting for one another.
    """
    new_name = f"{settings.launch}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        try:
            store = distributed.distributed_c10d._get_default_store()
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its restarts
            return str(store.compare_set(f"{_SHARED_KEY}/{attempt}", "", new_name).decode())
        except Exception:  # noqa: BLE001 a store that cannot: a launch then holds one training
            return settings.launch
    return new_name


def _wrap(
    owner: type,
    name: str,
    *,
    after: Callable[..., None] | None = None,
    result: Callable[..., None] | None = None,
    around: Callable[..., Any] | None = None,
) -> None:
    """Wrap a method of a class so that its calls are observed.

    `after` gets the arguments, `result` the value and the arguments; `around` gets the method and the arguments, calls
    it and returns its value. Name, signature and documentation stay those of the method.
    """
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        value = method(*args, **kwargs) if around is None else around(method, *args, **kwargs)
        if after is not None:
            after(*args)
        if result is not None:
            result(value, *args)
        return value

    setattr(owner, name, wrapper)
