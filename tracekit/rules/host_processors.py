"""Rules on hosts whose training threads lack a processor, or the interpreter."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.compute import interrupted_python
from tracekit.analysis.host import cpu_contention
from tracekit.analysis.time import cpu_times
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.device_time import INTERRUPTED_PYTHON
from tracekit.replay.graph.causes.host import OVERSUBSCRIBED_CORES
from tracekit.rules import quoted_step
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf


@dataclass(frozen=True)
class OversubscribedHost(Rule):
    """A host of a CPU run that has more computing threads than cores.

    What it does: reports steps of a CPU run in which ops take longer than the fastest op with the same name and input
    shapes by `min_lost_ratio` of the step or more, because their threads lack processors.

    Why it costs: an op with several threads ends when its last thread does. Where the threads of all ranks outnumber
    the cores, each barrier inside an op waits until the scheduler has run all of them: an op takes several times as
    long as with one thread.

    How it is measured: threads, ranks and cores (affinity and the quota of the control group) are those in run.json,
    which the recorder writes. Without them, ops must compute for longer than the process had CPU time, by the metrics
    log: meanwhile their threads were not running. Either way most identical ops must be slow: a third of the excess or
    more in the median call. Where other processes interrupt, few calls have all of it, and nothing is reported, unless
    stated threads outnumber the cores and were ready to run without a processor for 8% of the time, by the log.
    Without stated threads the finding is information, unless late ranks are its consequence: other processes on all
    cores look the same. The cost is the saving of a replay in which each op takes as long as the fastest identical one
    of its rank: it is too low where all are slow. Steps that save are left out.

    Where a rank may use fewer cores than the host has ranks (affinity, quota), it is enough that the training's
    threads were ready to run without a processor for 8% of the time, by the metrics log: with cores of their own they
    would not wait. Ranks take turns there in ops, between ops and in collectives, so the cost is what a step takes
    beyond the CPU time of its busiest rank and the time for which no core was used, if that is more.

    How to fix: give each rank its share of the cores: OMP_NUM_THREADS (torchrun sets 1 for several ranks) or
    torch.set_num_threads, cores divided by ranks; a binding of each rank to cores of its own; fewer DataLoader workers;
    a larger CPU quota of the container.

    Blind spots: runs with devices are not judged. Recordings without run.json and without a metrics log state neither
    threads nor CPU time. Ops with the same shapes may differ in their values (sparse, denormal).
    """

    code: ClassVar[str] = "HOST007"
    fix_without_pytorch: ClassVar[str] = (
        "Give the process as many cores as it has busy threads, or start fewer threads (OMP_NUM_THREADS), and bind "
        "ranks to different cores (numactl, taskset)."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (*cpu_contention.FACTS, *save_stages.FACTS)
    min_lost_ratio: float = 0.05

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst rank's median step exceeds the threshold."""
        slow = run.table(cpu_contention.contended_ops)
        losses = save_stages.losses(run, slow, "excess_ns")
        stated = cpu_contention.processors(run)
        is_shared = stated is not None and stated.has_fewer_cores_than_ranks
        if stated is not None and is_shared and slow.height:
            turns = losses.join(cpu_contention.turns(run, stated), on=["window", "rank", "step"], how="left")
            turns_ns = pl.min_horizontal("turns_ns", "duration_ns").fill_null(0)
            losses = turns.with_columns(pl.max_horizontal("lost_ns", turns_ns).alias("lost_ns")).with_columns(
                (pl.col("lost_ns") / pl.col("duration_ns")).alias("lost_ratio")
            )
        loss = quoted_step.worst_loss(losses, self.min_lost_ratio)
        if loss is None:
            return
        is_stated = is_shared or (stated is not None and stated.is_oversubscribed)
        times = loss.rows(run.table(cpu_times.cpu_times))
        if stated is not None and is_shared:
            why = f"{stated.ranks} ranks share {units.count(int(stated.cores), 'core')}"
            fix = (
                "Let each rank run on cores of its own: the binding of the launcher (numactl, taskset, Slurm's "
                "--cpus-per-task and --cpu-bind), the cpuset or CPU quota of the container. run.json states them."
            )
        elif stated is not None and is_stated:
            why = f"{stated.ranks} ranks of {stated.threads} threads each share {stated.cores:g} cores"
            share = max(1, int(stated.cores // stated.ranks))
            fix = f"Set OMP_NUM_THREADS={share} (cores divided by ranks), or torch.set_num_threads({share})."
        else:
            why = "its ops take longer than the CPU time that their process gets"
            fix = (
                "Set OMP_NUM_THREADS to the cores divided by the ranks of the host (torchrun sets 1), and see which "
                "other processes run there. Record again: run.json then states threads and cores."
            )
        cpu = ""
        if times.height:
            cpu = f" The process had {units.duration(times['cpu_ns'][0])} of CPU time"
            cpu += f" in {units.duration(times['wall_ns'][0])}."
        lost = f"{loss.rows(slow).height:,} ops take {loss} longer than the fastest ones with the same inputs"
        if is_shared:
            lost = f"they wait for each other's turn for {loss}"
        yield loss.finding(
            self,
            Severity.WARNING,
            f"{why[0].upper()}{why[1:]}: {lost}.{cpu}",
            fix,
            confidence=0.9 if is_stated else 0.4,
            what_if=None if is_shared else WhatIf(OVERSUBSCRIBED_CORES),
            evidence=quoted_step.evidence(slow, loss.row, "excess_ns").select(
                "window", "rank", "step", "name", "start_ns", "dur_ns", "excess_ns"
            ),
            claim=f"The host is oversubscribed: {why}",
        )


@dataclass(frozen=True)
class InterruptedPython(Rule):
    """Python of the training that other threads of its process interrupt in every step.

    What it does: reports steps of a CPU run in which Python between ops takes longer than in the fastest step, at
    changing places, by `min_lost_ratio` of the step or more.

    Why it costs: one thread of a process runs Python at a time. Another one that computes in Python (a background save,
    a loader thread, metrics) keeps the global interpreter lock (GIL) for 5 ms each time; the training waits for it
    whenever it comes back from an op.

    How it is measured: each pause of Python between two ops against the same pause in the other steps. Every step must
    lose a tenth of its time, of four steps or more, and half of all that is slower than at its fastest must be Python,
    clearly more than Python has of the fastest steps: where threads lack a core, ops are slower, too. By the metrics
    log, ops may also wait for a processor while other threads of the process use it: that counts as well, and where
    these threads are at work for a tenth of the median step, three of four steps that lose as much are enough. The
    message quotes the median step of the worst rank.

    How to fix: move that work into a process (torch.multiprocessing, AsyncCheckpointerType.PROCESS, DataLoader workers
    instead of threads); let it release the GIL (NumPy, compression and file I/O on large buffers do).

    Blind spots: the other thread is not recorded unless it calls ops: py-spy dump shows it. Garbage collection and
    compiling have rules of their own (HOST006, HOST005). On a GPU such pauses make a step launch-bound (HOST001).
    """

    code: ClassVar[str] = "HOST008"
    facts: ClassVar[tuple[TraceFact, ...]] = (interrupted_python.interrupted_python, *save_stages.FACTS)
    min_lost_ratio: float = 0.1

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst rank's median step exceeds the threshold."""
        pauses = run.table(self.facts[0])
        loss = quoted_step.worst_loss(save_stages.losses(run, pauses, "saved_ns"), self.min_lost_ratio)
        if loss is None:
            return
        rows = loss.rows(pauses).filter(pl.col("saved_ns") > 0)
        waited_ns = int(rows["waited_ns"].sum())
        longer_ns = int(rows["saved_ns"].sum()) - waited_ns
        pairs = units.count(rows.filter(pl.col("saved_ns") > pl.col("waited_ns")).height, "pair")
        message = f"Python between {pairs} of ops takes {loss} longer than in the fastest step, at other places in each"
        message += " step, while the ops themselves are hardly slower: another thread of the process holds the "
        message += "interpreter (GIL)."
        if waited_ns:
            message = f"Other threads of the process take {loss}: Python between {pairs} of ops takes "
            message += f"{units.duration(longer_ns)} longer than in the fastest step, at other places in each step (a "
            message += f"thread holds the interpreter, GIL), and ops wait {units.duration(waited_ns)} for a processor."
        yield loss.finding(
            self,
            Severity.WARNING,
            message,
            "Find the thread (py-spy dump --pid PID) and move its work into a process, or into calls that release the "
            "GIL: background saves with AsyncCheckpointerType.PROCESS, loading and metrics in worker processes.",
            confidence=0.8,
            what_if=WhatIf(INTERRUPTED_PYTHON),
            evidence=quoted_step.evidence(rows, loss.row, "saved_ns").select(
                "window", "rank", "step", "name", "start_ns", "dur_ns", "waited_ns", "saved_ns"
            ),
            claim=f"Other threads interrupt the Python of rank {loss.row['rank']} in every step",
        )
