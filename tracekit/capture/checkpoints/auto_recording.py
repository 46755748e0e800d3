"""Record the saves and loads of an unchanged script: its calls into torch and safetensors.

One entry point per library, to be called once the script has imported it; none imports more than the script did. A
wrapped function has the same signature, docstring, name and result, and records only where `folder` returns a folder.
Deprecated functions (`save_state_dict`, `load_state_dict`) are not wrapped.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tracekit import conventions
from tracekit.capture.checkpoints import dcp, operation, recording, single_file
from tracekit.capture.checkpoints.dcp import BackgroundSave, current_background_save, in_daemon
from tracekit.capture.checkpoints.operation import Operation
from tracekit.capture.checkpoints.recording import Endable, Entry, RecordedCall, Recording, RunContext, guard

Begin = Callable[[RunContext, Path, tuple[Any, ...], dict[str, Any]], Endable | None]

_MARK = "_recorded_by_tracekit"
_contexts: dict[str, RunContext] = {}


@guard
def watch_torch_files(
    folder: Callable[[], Path | None], rank: Callable[[], int], step: Callable[[], int | None]
) -> None:
    """Record ``torch.save`` and ``torch.load`` from now on, where `folder` returns a run's folder, as `rank`.

    `step` returns the optimizer steps done, or None. Calling it again replaces the three. Saves and
    loads below the limits of `tracekit.capture.checkpoints.single_file` are not logged.
    """
    import torch.serialization

    _contexts["files"] = RunContext(folder, rank, step)
    _replace("torch", torch.serialization, "save", _recording_file(single_file.TORCH_SAVE))
    _replace("torch", torch.serialization, "load", _recording_file(single_file.TORCH_LOAD))


@guard
def watch_safetensors(
    folder: Callable[[], Path | None], rank: Callable[[], int], step: Callable[[], int | None]
) -> None:
    """Record ``safetensors.torch.save_file`` and ``load_file``, as `watch_torch_files` does, if that is imported."""
    module = sys.modules.get("safetensors.torch")
    if module is None:
        return
    _contexts["files"] = RunContext(folder, rank, step)
    _replace("safetensors", module, "save_file", _recording_file(single_file.SAFETENSORS_SAVE))
    _replace("safetensors", module, "load_file", _recording_file(single_file.SAFETENSORS_LOAD))


@guard
def watch_distributed_checkpoints(
    folder: Callable[[], Path | None], rank: Callable[[], int], step: Callable[[], int | None]
) -> None:
    """Record ``save``, ``async_save`` and ``load`` of torch.distributed.checkpoint, as `watch_torch_files` does."""
    saver = sys.modules.get("torch.distributed.checkpoint.state_dict_saver")
    loader = sys.modules.get("torch.distributed.checkpoint.state_dict_loader")
    if saver is None or loader is None:
        return
    _contexts["dcp"] = RunContext(folder, rank, step)
    _replace("torch", saver, "save", _recording(_begin_dcp_save, "dcp"))
    _replace("torch", saver, "async_save", _recording_in_background)
    _replace("torch", loader, "load", _recording(_begin_dcp_load, "dcp"))


def _replace(package: str, module: ModuleType, name: str, wrap: Callable[..., Any]) -> None:
    """Replace a module's function by a wrapped one, also wherever its package has imported it."""
    original = getattr(module, name, None)
    if original is None or hasattr(original, _MARK):
        return
    wrapped = functools.wraps(original)(wrap(original))
    setattr(wrapped, _MARK, True)
    for path, importer in tuple(sys.modules.items()):
        if path.partition(".")[0] == package and getattr(importer, "__dict__", {}).get(name) is original:
            setattr(importer, name, wrapped)


def _recording(begin: Begin, library: str) -> Callable[..., Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            folder = _folder(library)
            if folder is None:
                return original(*args, **kwargs)
            with RecordedCall(lambda: begin(_contexts[library], folder, args, kwargs)):
                return original(*args, **kwargs)

        return call

    return wrap


def _recording_file(call: single_file.Call) -> Callable[..., Any]:
    return _recording(functools.partial(single_file.begin, call), "files")


def _recording_in_background(original: Callable[..., Any]) -> Callable[..., Any]:
    def async_save(*args: Any, **kwargs: Any) -> Any:
        folder = _folder("dcp")
        background = None if folder is None else _background_save(_contexts["dcp"], folder, args, kwargs)
        if background is None:
            return original(*args, **kwargs)
        with RecordedCall(lambda: _begin_async_save(_contexts["dcp"], background)) as recorded:
            response = original(*args, **kwargs)
            if recorded.recording is not None:
                guard(background.watch_futures)(response)
            return response

    return async_save


def _folder(library: str) -> Path | None:
    """Folder to record a call on this thread into; None where it is not recorded."""
    try:
        # A save inside another save is part of it.
        if operation.current() is not None:
            return None
        background = current_background_save()
        return _contexts[library].folder() if background is None else background.entry.folder
    except Exception as error:  # noqa: BLE001 whatever fails here, the training continues
        recording.report_once(error)
        return None


def _begin_dcp_save(context: RunContext, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    background = current_background_save()
    if background is not None:
        return _begin_background_save(context, background)
    daemon = in_daemon()
    call = conventions.DCP_ASYNC_SAVE if daemon else conventions.DCP_SAVE
    entry = context.entry(folder, conventions.SAVE, call, _path(args, kwargs, "storage_writer"))
    if daemon:
        entry = entry.on_worker(conventions.PROCESS)
    blocking = False if daemon else None
    return recording.begin(operation.SAVE, dcp.attach_save, lambda _: entry, step=context.step, blocking=blocking)


def _begin_background_save(context: RunContext, background: BackgroundSave) -> Recording:
    def conclude(saved: Operation) -> Entry:
        background.operation = saved
        return entry

    entry = background.entry.on_worker(conventions.THREAD)
    return recording.begin(operation.SAVE, dcp.attach_save, conclude, step=context.step)


def _begin_dcp_load(context: RunContext, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    path = _path(args, kwargs, "storage_reader")
    entry = context.entry(folder, conventions.LOAD, conventions.DCP_LOAD, path)
    return recording.begin(operation.LOAD, dcp.attach_load, lambda _: entry, step=context.step)


@guard
def _background_save(
    context: RunContext, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BackgroundSave:
    path = _path(args, kwargs, "storage_writer")
    entry = context.entry(folder, conventions.SAVE, conventions.DCP_ASYNC_SAVE, path)
    kind = str(getattr(kwargs.get("async_checkpointer_type"), "name", "THREAD"))
    return BackgroundSave(entry, serve=_serve_recorded if kind == "PROCESS" else None)


def _begin_async_save(context: RunContext, save: BackgroundSave) -> Recording:
    kind = operation.ASYNC_SAVE
    return recording.begin(kind, save.attach, lambda _: save.entry, step=context.step, hand_over=save.hand_over)


def _serve_recorded(folder: str, rank: int, *args: Any) -> None:
    """Record and save: the main function of the process that torch starts to save checkpoints."""
    from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess

    watch_distributed_checkpoints(lambda: Path(folder), lambda: rank, lambda: None)
    _AsyncCheckpointProcess._checkpointing_subprocess(*args)


def _path(args: tuple[Any, ...], kwargs: dict[str, Any], storage: str) -> str | None:
    # In old versions the storage was the second argument, and torch still accepts that.
    owner = kwargs.get(storage) or (args[1] if len(args) > 1 else None)
    path = kwargs.get("checkpoint_id") or getattr(owner, "path", None) or getattr(owner, "checkpoint_id", None)
    return None if path is None else str(path)
