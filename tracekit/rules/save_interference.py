"""Rules on saves that block training because they share the machine."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tracekit.analysis.checkpoint import stalls
from tracekit.rules.save_stalls import StalledSave, cost


@dataclass(frozen=True)
class GlobalSync(StalledSave):
    """Saves that sync the whole machine.

    What it does: reports saves whose largest part is `os.sync`. Not reported below `min_blocked_ms` or
    `max_overhead_ratio` of the time.

    Why it costs: it waits for the dirty pages of every process on the machine, not only for those of the checkpoint.

    How it is measured: sync calls without a file, counted by the recorder.

    How to fix: torch calls os.sync if a stream has no file descriptor, as with fsspec: disable syncing there.

    Blind spots: needs a checkpoint log of this version; older ones do not distinguish `os.sync` from `os.fsync`.
    """

    code: ClassVar[str] = "CKPT008"
    kind: ClassVar[str] = stalls.GLOBAL_SYNC
    fix: ClassVar[str] = (
        "Use FsspecWriter(…, sync_files=False) if the store makes writes durable itself, as object stores do."
    )

    def _subject(self, row: dict[str, Any]) -> str:
        return f"os.sync, which syncs the whole machine, takes {cost(row)}"

    def _detail(self, row: dict[str, Any]) -> str:
        return f", on rank {row['rank']}, whose stream has no file descriptor to sync"


@dataclass(frozen=True)
class CrowdedSave(StalledSave):
    """Saves that wait for CPU cores.

    What it does: reports saves whose largest part is waiting that no rank's work explains but a lack of CPU cores does.
    Not reported below `min_blocked_ms` or `max_overhead_ratio` of the time.

    Why it costs: ranks meet several times in a save, and each time they wait for the rank that gets no core.

    How it is measured: the time of the save that is not on its critical path, as far as the rank with the largest run
    delay, measured by the system's scheduler, was ready to run but did not run.

    How to fix: leave CPU cores free for the ranks.

    Blind spots: needs a checkpoint log with counters, which Linux provides. Run delay inside stages counts as those
    stages.
    """

    code: ClassVar[str] = "CKPT016"
    kind: ClassVar[str] = stalls.CPU_CONTENTION
    fix: ClassVar[str] = (
        "Give each rank more CPU cores (--cpus-per-task), or run fewer DataLoader workers and threads "
        "(OMP_NUM_THREADS). Check for other processes on the node of rank RANK."
    )

    def _subject(self, row: dict[str, Any]) -> str:
        return f"Waiting for a CPU core takes {cost(row)}"

    def _detail(self, row: dict[str, Any]) -> str:
        return f", most of it on rank {row['rank']}"
