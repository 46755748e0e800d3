"""Metrics of steps for TensorBoard: a folder of scalars for each rank."""

from pathlib import Path

import polars as pl

from tracekit.errors import InputError, MissingExtraError


def write(samples: pl.DataFrame, out: Path) -> None:
    """Write samples (columns of `step_metrics`) into the folders rank00000, … of a new folder.

    Raises InputError if the folder has files, MissingExtraError without TensorBoard.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise MissingExtraError("this format needs TensorBoard: pip install 'torch-tracekit[tensorboard]'") from None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: is not an empty folder; name a new one, which tensorboard --logdir then shows")
    for (rank,), rank_samples in samples.sort("rank", "step").group_by("rank", maintain_order=True):
        writer = EventFileWriter(str(out / f"rank{rank:05}"))
        for (step,), of_step in rank_samples.group_by("step", maintain_order=True):
            values = [
                Summary.Value(tag=name, simple_value=value) for name, value in of_step["name", "value"].iter_rows()
            ]
            wall_time_s = (of_step["at_ns"][0] or 0) / 1e9
            writer.add_event(Event(wall_time=wall_time_s, step=step, summary=Summary(value=values)))
        writer.close()
