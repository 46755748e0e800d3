"""What a training writes for TensorBoard and Weights & Biases, read back by their own readers."""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tracekit
from instrumented_trainers.config import InvalidConfigError, TrainingConfig
from instrumented_trainers.trackers import Trackers
from tests.integration import trainings
from tests.integration.launched import MICRO, train
from tracekit import conventions

PROFILED = ["--profile-wait", "0", "--profile-warmup", "1", "--profile-active", "2"]
EVALUATED = [
    *PROFILED,
    "--steps",
    "4",
    "--eval-every",
    "2",
    "--eval-split",
    "0.05",
    "--eval-steps",
    "1",
    "--peak-flops",
    "1e12",
]


def test_tensorboard_reads_the_scalars_of_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra [tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    code, _, err = train("--strategy", "ddp", "--out", str(run), *MICRO, *EVALUATED, "--tensorboard")
    assert code == 0, err
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    rows = trainings.rows(run, 0, conventions.METRICS_SUFFIX)
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows]
    evaluated = [(event.step, event.value) for event in events.Scalars("eval/loss")]
    assert evaluated == [(step, pytest.approx(rows[step]["eval_loss"], rel=1e-6)) for step in (1, 3)]
    assert {"train/learning_rate", "speed/tokens_per_second", "speed/mfu_ratio"} <= set(events.Tags()["scalars"])
    assert tracekit.load(str(run), cache=False).ranks == (0, 1)


def test_wandb_has_the_scalars_of_every_step_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the extra [wandb]")
    from wandb.proto import wandb_internal_pb2

    run = tmp_path / "run"
    code, _, err = train("--strategy", "ddp", "--out", str(run), *MICRO, *EVALUATED, "--wandb", "offline")
    assert code == 0, err
    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    losses = []
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        losses += [float(items["train/loss"])] if "train/loss" in items else []
    rows = trainings.rows(run, 0, conventions.METRICS_SUFFIX)
    assert losses == pytest.approx([row["loss"] for row in rows], rel=1e-6)
    assert tracekit.load(str(run), cache=False).ranks == (0, 1)


def wandb_records(file: bytes) -> Iterator[bytes]:
    """Yield the records of a file of wandb: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    block, place, parts = 1 << 15, 7, b""
    while place + 7 <= len(file):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", file, place)
        parts += file[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = TrainingConfig(
        "ddp", tmp_path, tensorboard=package == "tensorboard", wandb="offline" * (package == "wandb") or None
    )
    with pytest.raises(InvalidConfigError, match=rf"--{package}: .*pip install 'torch-tracekit\[{package}\]'"):
        Trackers(config, 0, first_step=0)
