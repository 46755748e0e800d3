"""The traces of all roles of a job as one run, for one timeline: one role after the other, ranks numbered through."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import polars as pl

from tracekit.model.run import OFFSETS, Run, other_roles
from tracekit.model.source import Source
from tracekit.model.trace import Trace


@dataclass(frozen=True)
class JoinedRoles:
    """The run of all roles, and of each of its ranks the role and the rank there, such as "rollout rank 0"."""

    run: Run
    labels: dict[int, str]


def join_roles(run: Run) -> JoinedRoles:
    """Run with the traces of all roles of a run's job, whose own ranks come first and keep their numbers.

    The clocks of the roles are taken for one, as those of processes of one host are. A run without roles is itself.
    """
    if not run.roles:
        return JoinedRoles(run, {})
    sources: list[Source] = []
    offsets, labels = [], dict[int, str]()
    for number, role_run in enumerate((run, *other_roles(run))):
        first = max(labels, default=-1) + 1
        ranks = {rank: rank if role_run is run else first + place for place, rank in enumerate(role_run.ranks)}
        labels |= {joined: f"{role_run.role} rank {rank}" for rank, joined in ranks.items()}
        sources += [_with_rank(source, ranks[source.rank]) for source in role_run.sources]
        of_role = pl.col("rank").replace_strict(ranks, return_dtype=pl.Int64)
        domain = pl.col("clock_domain") + number * _MAX_DOMAINS
        offsets.append(role_run.offsets.with_columns(of_role, domain))
    all_offsets = OFFSETS.conform(pl.concat(offsets))
    joined_run = Run(run.path, sources, manifest=run.manifest, align=lambda _: all_offsets)
    return JoinedRoles(joined_run, labels)


_MAX_DOMAINS = 1 << 20
"""More than a role has: a job has no more ranks."""


def _with_rank(source: Source, rank: int) -> Source:
    return replace(source, rank=rank, read=partial(_read_with_rank, source.read, rank))


def _read_with_rank(read: Callable[[], Trace], rank: int) -> Trace:
    return read().replace(rank=rank)
