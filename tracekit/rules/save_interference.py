"""Rules on saves that block training because they share the machine."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tracekit.analysis.checkpoint import stalls
from tracekit.rules.save_stalls import StalledSave, cost


@dataclass(frozen=True)
class GlobalSync(StalledSave):
    """Saves that sync the whole machine.

    What it does: reports saves whose largest part is `os.sync`. Silent where a save blocks for less than
    `min_blocked_ms` or `max_overhead_ratio` of the time.

    Why it costs: it waits for the dirty pages of every process on the machine, not only for the checkpoint's.

    How it is measured: syncs without a file, counted by the recorder.

    How to fix: torch syncs so where a stream has no descriptor, as with fsspec: turn syncing off there.

    Blind spots: needs a checkpoint log of this version; older ones do not tell `os.sync` from `os.fsync`.
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
    """Saves that wait for processors.

    What it does: reports saves whose largest part is waiting that nobody's work explains and that a lack of processors
    does. Silent where a save blocks for less than `min_blocked_ms` or `max_overhead_ratio` of the time.

    Why it costs: ranks meet several times in a save, and each time the one that gets no processor is waited for.

    How it is measured: what of the save is left after the way that all ranks wait for, as far as the rank with the
    largest run delay, by the system's scheduler, was ready to run and did not.

    How to fix: leave processors free for the ranks.

    Blind spots: needs a checkpoint log with counters, which Linux gives. Run delay inside of stages is counted to them.
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
