"""Simulated runs whose clocks and collectives are known: what alignment and matching must find again.

Every collective ends at one moment of true time on all its ranks, give or take `jitter_ns`; each rank's file states it
on a clock that is `clocks[rank]` behind, and drifts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.trace import Trace

MS, US = 1_000_000, 1_000
EPOCH_NS = 1_790_000_000_000_000_000


@dataclass(frozen=True)
class Collective:
    """One collective in true time: when each rank came, when all left, and what it was."""

    key: int
    op: str
    group: str
    bytes: int | None
    arrivals: Mapping[int, int]
    end_ns: int
    step: int


@dataclass
class Job:
    """A simulated job: groups of ranks by name, and what they did."""

    groups: Mapping[str, Sequence[int]]
    seed: int = 0
    now_ns: int = 0
    done: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def run(
        self, group: str, op: str, size: int | None, *, step: int = 0, spread_ns: int = 2 * MS, transfer_ns: int = MS
    ) -> None:
        """Let the group do one collective, after its ranks have come at times up to `spread_ns` apart."""
        self.now_ns += int(self.random.integers(MS // 2, 5 * MS))
        come = {rank: int(self.random.integers(0, spread_ns)) for rank in self.groups[group]}
        self.collect(group, op, size, come, step=step, transfer_ns=transfer_ns)

    def collect(
        self, group: str, op: str, size: int | None, come: Mapping[int, int], *, step: int = 0, transfer_ns: int = MS
    ) -> None:
        """Let the group do one collective now; `come` says how long from now each rank comes."""
        arrivals = {rank: self.now_ns + after_ns for rank, after_ns in come.items()}
        self.now_ns = max(arrivals.values()) + transfer_ns
        self.done.append(Collective(len(self.done), op, group, size, arrivals, self.now_ns, step))

    def steps(self, count: int, calls: Sequence[tuple[str, str, int | None]]) -> "Job":
        """Repeat the same calls (group, op, size) in each of `count` steps, as training does."""
        for step in range(count):
            for group, op, size in calls:
                self.run(group, op, size, step=step)
        return self

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for ranks in self.groups.values() for rank in ranks})

    def trace(
        self,
        rank: int,
        *,
        behind_ns: int = 0,
        drift: float = 0.0,
        jitter_ns: int = 0,
        drop: Sequence[int] = (),
        first: int = 0,
        last: int | None = None,
        with_seq: bool = False,
        knows_groups: bool = True,
        sends: int = 0,
        names: Mapping[str, str] | None = None,
        resolution_ns: int = 1,
    ) -> Trace:
        """Return what `rank` recorded, with the collectives in `drop` missing and its window from `first` to `last`.

        The activity_id of a call is the key of the collective, so a test can check the match.
        """
        rank_calls = [c for c in self.done if rank in c.arrivals]
        seqs: dict[str, int] = {}
        rows, calls = [], []
        names = names or {}
        for c in rank_calls:
            seqs[c.group] = seqs.get(c.group, 0) + 1
            if c.key in drop or c.key < first or (last is not None and c.key > last):
                continue
            late = int(self.random.integers(-jitter_ns, jitter_ns + 1)) if jitter_ns else 0
            start, end = (EPOCH_NS + t - behind_ns - round(drift * t) for t in (c.arrivals[rank], c.end_ns + late))
            start, end = start // resolution_ns * resolution_ns, end // resolution_ns * resolution_ns
            rows.append((c.key, 0, f"nccl {c.op}", "communication", start, end - start, c.step))
            group = names.get(c.group, c.group) if knows_groups else None
            size = len(self.groups[c.group]) if knows_groups else None
            calls.append((c.key, c.op, group, seqs[c.group] if with_seq else None, "Float", c.bytes, c.bytes, size))
        for i in range(sends):
            at = EPOCH_NS - behind_ns + int(self.random.integers(0, max(self.now_ns, 1)))
            rows.append((1_000_000 + i, 0, "nccl send", "communication", at, 10 * US, 0))
            calls.append((1_000_000 + i, "send", None, None, "Float", 4096, 4096, 2))
        listed = [(names.get(g, g), g, "nccl", list(ranks)) for g, ranks in self.groups.items() if rank in ranks]
        activity = ("id", "lane", "name", "kind", "start_ns", "dur_ns", "step")
        collective = ("activity_id", "op", "group", "seq", "dtype", "sent_bytes", "received_bytes", "group_size")
        return Trace(
            rank=rank,
            window=0,
            path=f"simulated-rank{rank}",
            activities=schema.ACTIVITIES.conform(pl.DataFrame(rows, schema=activity, orient="row")),
            collectives=schema.COLLECTIVES.conform(
                pl.DataFrame(calls, schema=collective, orient="row", infer_schema_length=None)
            ),
            groups=pl.DataFrame(listed if knows_groups else [], schema=schema.GROUPS.schema, orient="row"),
        )
