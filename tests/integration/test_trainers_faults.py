"""Each fault on demand does what it says, by measures of its own, and leaves the losses alone."""

import functools
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from instrumented_trainers import faults
from instrumented_trainers.faults import FAULTS, REGRESSIONS
from tests.integration import fault_signs, trainings
from tests.integration.fault_signs import named, stage
from tests.integration.trainings import case, micro
from tests.support import process_group
from tracekit import conventions

STEPS, LAYERS, ACTIVE = 5, 2, 2
PLAIN = (1, 3)
SLOW_RANK_MS, LATE_MS, DATA_MS, FSYNC_MS, RATE = 100, 5, 60, 300, 1_000_000
FAULT_OPTIONS = (
    f"slow-rank=1:{SLOW_RANK_MS}ms",
    f"late-launch={LATE_MS}ms",
    "no-prefetch",
    "churn=4",
    f"slow-disk={RATE // 1_000_000}MB/s:1",
    f"slow-fsync={FSYNC_MS}ms",
    "small-tensors=60",
    "gil-save=60",
    "host-sync",
    f"dataloader={DATA_MS}ms",
)
REGRESSED = ("more-compute=3", "more-communication=64", "more-memory=5")
NAMES = tuple(text.partition("=")[0] for text in FAULT_OPTIONS)
SETTINGS = {"steps": STEPS, "checkpoint_every": 3, "prefetch": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Mapping[str, process_group.Outcome]:
    cases = {"none": case(micro("fsdp2", folder / "none", **SETTINGS))}
    for name, fault in zip(NAMES, FAULT_OPTIONS, strict=True):
        of_saves = {"profile_wait": 99} if FAULTS[name].needs_saves else {}
        cases[name] = case(micro("fsdp2", folder / name, **{**SETTINGS, **of_saves}, fault=(fault,)))
    cases["regressions"] = case(micro("fsdp2", folder / "regressions", **SETTINGS, fault=REGRESSED))
    for name in ("yafsdp", "fsdp1"):
        cases[name] = case(micro(name, folder / name, steps=4))
        cases[f"{name} no-prefetch"] = case(
            micro(name, folder / f"{name} no-prefetch", steps=4, fault=("no-prefetch",))
        )
    return process_group.run_cases(2, cases)


def trained(outcomes: Mapping[str, process_group.Outcome], name: str) -> list[Any]:
    return outcomes[name].results()


def test_every_fault_is_tried_here() -> None:
    assert tuple(FAULTS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_without_the_fault_and_the_truth_is_written_down(
    folder: Path, outcomes: Mapping[str, process_group.Outcome], name: str
) -> None:
    healthy = [losses for losses, _ in trained(outcomes, "none")]
    assert [losses for losses, _ in trained(outcomes, name)] == healthy
    assert len(healthy[0]) == STEPS
    (truth,) = trainings.manifest(folder / name)["faults"]
    fault = faults.parse(dict(zip(NAMES, FAULT_OPTIONS, strict=True))[name])
    assert truth == {"name": name, "args": vars(fault), "seen_by": list(fault.seen_by)}
    assert trainings.manifest(folder / "none")["faults"] == []


def test_a_slow_rank_computes_longer_and_all_wait_for_it(
    folder: Path, outcomes: Mapping[str, process_group.Outcome]
) -> None:
    trained(outcomes, "none"), trained(outcomes, "slow-rank")
    assert min(fault_signs.extra_compute_ms(folder / "slow-rank", 1)) >= 0.9 * SLOW_RANK_MS
    for run, rank in (("slow-rank", 0), ("none", 1)):
        assert fault_signs.extra_compute_ms(folder / run, rank) == [0.0] * ACTIVE
    for rank in (0, 1):
        # No step ends before the slow rank's, however busy the machine is; without the fault they take half as long.
        assert min(fault_signs.step_times_ms(folder / "slow-rank", rank, PLAIN)) >= 0.9 * SLOW_RANK_MS


def test_late_launch_leaves_nothing_running_before_each_layer(
    folder: Path, outcomes: Mapping[str, process_group.Outcome]
) -> None:
    trained(outcomes, "late-launch")
    late = list(fault_signs.quiet_before_layers_ms(folder / "late-launch"))
    assert len(late) == LAYERS * ACTIVE
    assert min(late) >= LATE_MS


@pytest.mark.parametrize(
    ("healthy", "faulty", "spans"),
    [("none", "no-prefetch", "FSDP"), ("yafsdp", "yafsdp no-prefetch", "YaFSDP")],
    ids=["fsdp2", "yafsdp"],
)
def test_without_prefetch_a_layer_is_gathered_after_the_one_before_it_ran(
    folder: Path, outcomes: Mapping[str, process_group.Outcome], healthy: str, faulty: str, spans: str
) -> None:
    assert [losses for losses, _ in trained(outcomes, healthy)] == [losses for losses, _ in trained(outcomes, faulty)]
    assert fault_signs.gathered_ahead(folder / healthy, spans) == [True] * ACTIVE
    assert fault_signs.gathered_ahead(folder / faulty, spans) == [False] * ACTIVE


def test_without_prefetch_fsdp1_names_no_prefetch(folder: Path, outcomes: Mapping[str, process_group.Outcome]) -> None:
    assert trained(outcomes, "fsdp1") == trained(outcomes, "fsdp1 no-prefetch")

    def gathers_before_use(run: Path) -> int:
        hooks = named(run, 0, "FullyShardedDataParallel._pre_backward_prefetch")
        gathers = named(run, 0, "c10d::_allgather_base_") + named(run, 0, "c10d::allgather_")
        return sum(any(fault_signs.within(gather, hook) for gather in gathers) for hook in hooks)

    assert gathers_before_use(folder / "fsdp1") > 0
    assert gathers_before_use(folder / "fsdp1 no-prefetch") == 0


def test_churn_takes_a_large_buffer_in_each_layer(folder: Path, outcomes: Mapping[str, process_group.Outcome]) -> None:
    trained(outcomes, "churn")
    taken = fault_signs.blocks_bytes(folder / "churn", 4 << 20)
    assert len(taken) == LAYERS * ACTIVE
    assert taken == sorted(taken)
    assert taken[0] < taken[-1]
    assert fault_signs.blocks_bytes(folder / "none", 4 << 20) == []


def test_a_slow_disk_writes_at_its_rate_on_its_rank(
    folder: Path, outcomes: Mapping[str, process_group.Outcome]
) -> None:
    def write_s(name: str, rank: int) -> float:
        return float(stage(folder / name, rank, conventions.WRITE)["dur_ns"]) / 1e9

    trained(outcomes, "slow-disk")
    size_bytes = (folder / "slow-disk" / "checkpoints" / "step-000003" / "__1_0.distcp").stat().st_size
    assert write_s("slow-disk", 1) >= 0.8 * size_bytes / RATE
    assert stage(folder / "slow-disk", 0, conventions.WAIT)["dur_ns"] >= 0.5e9 * size_bytes / RATE


def test_slow_fsync_syncs_as_late_as_it_says(folder: Path, outcomes: Mapping[str, process_group.Outcome]) -> None:
    trained(outcomes, "slow-fsync")
    for rank in (0, 1):
        late, healthy = (stage(folder / name, rank, conventions.FSYNC) for name in ("slow-fsync", "none"))
        assert late["files"] == healthy["files"]
        assert late["dur_ns"] >= FSYNC_MS * 1e6 * late["files"]


@pytest.mark.parametrize("name", ["small-tensors", "gil-save"])
def test_small_tensors_are_in_the_checkpoint(
    folder: Path, outcomes: Mapping[str, process_group.Outcome], name: str
) -> None:
    def tensors(run: Path) -> int:
        return len(FileSystemReader(run / "checkpoints" / "step-000003").read_metadata().state_dict_metadata)

    trained(outcomes, name)
    assert tensors(folder / name) == tensors(folder / "none") + 2 * 60
    assert stage(folder / name, 0, conventions.TOTAL)["blocking"] is (name == "small-tensors")


def test_host_sync_reads_one_number_a_layer_on_the_host(
    folder: Path, outcomes: Mapping[str, process_group.Outcome]
) -> None:
    trained(outcomes, "host-sync")
    assert fault_signs.reads(folder / "host-sync") - fault_signs.reads(folder / "none") == LAYERS * ACTIVE


def test_a_slow_dataloader_keeps_each_batch(folder: Path, outcomes: Mapping[str, process_group.Outcome]) -> None:
    trained(outcomes, "dataloader")
    late = fault_signs.waits_for_data_ms(folder / "dataloader")
    assert len(late) == ACTIVE
    assert min(late) >= DATA_MS


@pytest.mark.accuracy  # a busy machine is late as well
def test_without_a_fault_nothing_is_late(folder: Path, outcomes: Mapping[str, process_group.Outcome]) -> None:
    healthy = folder / "none"
    trained(outcomes, "none"), trained(outcomes, "slow-rank")
    # Against the faulty rank, not against a time: a machine may be slow.
    slow = fault_signs.step_times_ms(folder / "slow-rank", 1, PLAIN)
    assert min(fault_signs.step_times_ms(healthy, 1, PLAIN)) < min(slow) - SLOW_RANK_MS / 2
    assert min(fault_signs.quiet_before_layers_ms(healthy)) < LATE_MS / 2
    assert min(fault_signs.waits_for_data_ms(healthy)) < DATA_MS / 2
    trained(outcomes, "slow-disk")
    assert stage(folder / "slow-disk", 0, conventions.WRITE)["dur_ns"] < 0.5e9
    for rank in (0, 1):
        assert stage(healthy, rank, conventions.WRITE)["dur_ns"] < 0.5e9
        assert stage(healthy, rank, conventions.FSYNC)["dur_ns"] < FSYNC_MS * 1e6


# The lock: one rank, so that its training thread waits for nothing else -----------------------------------------------


def train_under_watch(run: Path, fault: tuple[str, ...]) -> float:
    """Train and return, of the time that the save took, the share in which the training thread wanted Python's lock.

    What Linux says of the thread is the measure: it neither ran nor waited for a processor, and there is nothing else
    that it could have waited for. The time in which it waited for a processor is left out.
    """
    samples: list[tuple[int, int, int]] = []
    over = threading.Event()
    schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def watch() -> None:
        while not over.wait(0.01):
            cpu_ns, delay_ns, _ = map(int, schedule.read_text().split())
            samples.append((time.time_ns(), cpu_ns, delay_ns))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        settings = {"steps": 120, "checkpoint_every": 60, "world_size": 1, "background_save": True}
        trainings.train(micro("ddp", run, **settings, profile_wait=1000, fault=fault))
    finally:
        over.set()
        watcher.join()
    saves = [row for row in trainings.rows(run, 0, conventions.CHECKPOINT_LOG_SUFFIX) if row["stage"] == "total"]
    begin_ns, end_ns = saves[0]["start_ns"], saves[0]["start_ns"] + saves[0]["dur_ns"]
    inside = [sample for sample in samples if begin_ns <= sample[0] <= end_ns]
    wall_ns, cpu_ns, delay_ns = (last - first for first, last in zip(inside[0], inside[-1], strict=True))
    return (wall_ns - cpu_ns - delay_ns) / (wall_ns - delay_ns)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's account of a thread's time")
def test_gil_save_keeps_the_training_thread_waiting_for_the_lock(tmp_path: Path) -> None:
    watched = functools.partial(train_under_watch, tmp_path / "run", ("gil-save=400",))
    (waiting_ratio,) = process_group.run(1, watched)
    assert waiting_ratio > 0.1


def test_regressions_do_more_work_and_change_no_loss(
    folder: Path, outcomes: Mapping[str, process_group.Outcome]
) -> None:
    assert tuple(text.partition("=")[0] for text in REGRESSED) == tuple(REGRESSIONS)
    healthy, more = (trained(outcomes, name) for name in ("none", "regressions"))
    assert [losses for losses, _ in more] == [losses for losses, _ in healthy]

    def work(run: Path) -> tuple[int, int, int]:
        """Return the products of a layer's output with itself, the sums of 64 KiB and the copies in all passes."""
        products = [e for e in named(run, 0, "aten::mm") if e["args"].get("Input Dims", [])[:2] == [[64, 64], [64, 64]]]
        sums = [e for e in named(run, 0, "gloo:all_reduce") if e["args"].get("Input Dims") == [[16384]]]
        copies = [e for e in named(run, 0, "aten::clone") if e["args"].get("Input Dims", [[]])[0] == [2, 32, 64]]
        return len(products), len(sums), len(copies)

    added = [more - plain for more, plain in zip(work(folder / "regressions"), work(folder / "none"), strict=True)]
    assert added == [3 * LAYERS * ACTIVE, LAYERS * ACTIVE, 5 * LAYERS * ACTIVE]
