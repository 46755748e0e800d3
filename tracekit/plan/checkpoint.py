"""Checkpoint size, writers, cost, and interval.

Sizes and layouts follow Megatron-LM (arXiv 2104.04473, section 5.10: a trillion parameters on 384 nodes take 13.8 TB,
written at 273 GB/s and read at 1 TB/s); sizes of other models MLPerf Storage v2.0; intervals Young (1974,
Communications of the ACM 17) and Daly (2006, Future Generation Computer Systems 22). Failures are exponential: they
come at a constant rate, also while training restores or repeats work. What a checkpoint takes depends on the model
alone, not on data, GPUs or frequency; and only the writers need bandwidth, not every GPU.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tracekit.errors import ConfigError

ADAM_BYTES_PER_PARAM = 14.0
"""Mixed-precision Adam without gradients: weights of 2 B, and of 4 B each master weights and both moments."""
WEIGHT_BYTES_PER_PARAM = 2.0
GUIDANCE_RATIO = 0.05
"""The share of time that saving should not be above."""
SCALES = (0.25, 0.5, 1, 2, 4)
"""Numbers of nodes relative to the planned one for which goodput is stated."""
_MOST_EXPONENT = 700.0
"""Beyond, exp is no double: an interval of so many times between failures is never completed."""


@dataclass(frozen=True)
class Layout:
    """How a model lies on GPUs: ranks per axis, ZeRO stage (3 is FSDP), GPUs per node."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.gpus_per_node) < 1:
            raise ConfigError("tp, pp, dp and GPUs per node must be 1 or more")
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"ZeRO stage {self.zero} does not exist: 0, 1, 2 or 3")


@dataclass(frozen=True)
class Storage:
    """Bandwidths of storage in bytes/s: of all nodes together, and the most that one node writes; None: not known.

    `burst_write_bytes_per_second` is of a faster tier before storage, all nodes together: a save blocks for the write
    to it alone, and is drained to storage while training goes on.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float | None = None
    node_write_bytes_per_second: float | None = None
    burst_write_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        rest = (self.read_bytes_per_second, self.node_write_bytes_per_second, self.burst_write_bytes_per_second)
        for value in (self.write_bytes_per_second, *rest):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"a bandwidth of {value:g} bytes/s is not possible: it must be above 0")


@dataclass(frozen=True)
class CheckpointPlan:
    """What saving and restoring cost. Times in s; None where an input that it needs was not given.

    `write_seconds` is until storage has it, `blocked_seconds` how long training is blocked; these differ where there
    is a burst buffer. `writer_skew_ratio`: what the writer with most writes, relative to the others.
    `best_interval_seconds` is from the start of a save to that of the next and trains most: `best_goodput_ratio` of the
    time, less what `restore_seconds` costs where it is known. Young's and Daly's are approximations of the time that
    trains between two saves.
    `guided_interval_seconds` and `guided_write_bytes_per_second` are the shortest interval, and the least bandwidth (of
    the burst buffer if there is one), with which saving takes no more than 5% of the time.
    """

    checkpoint_bytes: float
    writers: int
    write_seconds: float
    write_bytes_per_second: float
    write_bytes_per_second_per_gpu: float
    write_bytes_per_second_per_node: float
    overhead_ratio: float
    restore_bytes_per_second: float
    restore_seconds: float | None
    restore_amplification: float
    young_interval_seconds: float | None
    daly_interval_seconds: float | None
    best_interval_seconds: float | None
    goodput_ratio: float | None
    best_goodput_ratio: float | None
    blocked_seconds: float
    drain_seconds: float | None
    drain_fits_interval: bool | None
    writer_skew_ratio: float
    guided_interval_seconds: float
    guided_write_bytes_per_second: float


def checkpoint(
    params: float,
    layout: Layout,
    storage: Storage,
    *,
    interval_s: float,
    mtbf_s: float | None = None,
    bytes_per_param: float = ADAM_BYTES_PER_PARAM,
) -> CheckpointPlan:
    """Return the plan of checkpoints of a model of `params` parameters. Raises ConfigError for invalid input.

    `restore_bytes_per_second` is what a restore needs to take as long as the write. Saves are taken to block training,
    for the burst buffer only where there is one; what was saved protects once storage has it.

    >>> article = checkpoint(1e12, Layout(8, 64, 6), Storage(273e9), interval_s=4 * 3600, bytes_per_param=13.8)
    >>> round(article.write_seconds, 2), article.writers, f"{article.overhead_ratio:.3%}"
    (50.55, 512, '0.351%')
    """
    for name, value in (("parameters", params), ("interval", interval_s), ("bytes per parameter", bytes_per_param)):
        check_positive(name, value)
    size, number = params * bytes_per_param, writers(layout)
    nodes = math.ceil(number / layout.gpus_per_node)
    bandwidth = min(storage.write_bytes_per_second, (storage.node_write_bytes_per_second or math.inf) * nodes)
    write_s = size / bandwidth
    read_again = restore_amplification(layout, bytes_per_param)
    burst, read = storage.burst_write_bytes_per_second, storage.read_bytes_per_second
    blocked_s, drain_s = (size / burst, write_s) if burst else (write_s, None)
    restore_s = size * read_again / read if read else None
    failures = _over_failures(blocked_s, interval_s, mtbf_s, restore_s=restore_s, drain_s=drain_s or 0)
    return CheckpointPlan(
        checkpoint_bytes=size,
        writers=number,
        write_seconds=write_s,
        write_bytes_per_second=bandwidth,
        write_bytes_per_second_per_gpu=bandwidth / number,
        write_bytes_per_second_per_node=bandwidth / nodes,
        overhead_ratio=blocked_s / interval_s,
        restore_bytes_per_second=read_again * bandwidth,
        restore_seconds=restore_s,
        restore_amplification=read_again,
        **failures,
        blocked_seconds=blocked_s,
        drain_seconds=drain_s,
        drain_fits_interval=None if drain_s is None else drain_s <= interval_s - blocked_s,
        writer_skew_ratio=writer_skew_ratio(layout, bytes_per_param),
        guided_interval_seconds=blocked_s / GUIDANCE_RATIO,
        guided_write_bytes_per_second=size / (GUIDANCE_RATIO * interval_s),
    )


def _over_failures(
    blocked_s: float, interval_s: float, mtbf_s: float | None, *, restore_s: float | None, drain_s: float
) -> dict[str, float | None]:
    """Best intervals and goodput by the names of `CheckpointPlan`; None where an input is unknown."""
    if mtbf_s is None:
        names = "young_interval_seconds daly_interval_seconds best_interval_seconds goodput_ratio best_goodput_ratio"
        return dict.fromkeys(names.split())
    check_positive("mean time between failures", mtbf_s)
    best_s = best_interval_s(blocked_s, mtbf_s)
    goodputs = [
        None if restore_s is None else goodput_ratio(blocked_s, at_s, mtbf_s, restore_s=restore_s, drain_s=drain_s)
        for at_s in (interval_s, best_s)
    ]
    return {
        "young_interval_seconds": young_s(blocked_s, mtbf_s),
        "daly_interval_seconds": daly_s(blocked_s, mtbf_s),
        "best_interval_seconds": best_s,
        "goodput_ratio": goodputs[0],
        "best_goodput_ratio": goodputs[1],
    }


@dataclass(frozen=True)
class Scale:
    """A plan with another number of data-parallel ranks: nodes, their mean time between failures in s, and the plan."""

    nodes: int
    mtbf_seconds: float
    plan: CheckpointPlan


def over_nodes(
    params: float,
    layout: Layout,
    storage: Storage,
    *,
    interval_s: float,
    mtbf_s: float,
    bytes_per_param: float = ADAM_BYTES_PER_PARAM,
) -> Iterator[Scale]:
    """Yield the plan of SCALES times as many data-parallel ranks, where these are a whole number: nodes fail alone."""
    for scale in SCALES:
        dp = layout.dp * scale
        if dp < 1 or dp != int(dp):
            continue
        scaled = replace(layout, dp=int(dp))
        nodes = node_count(scaled)
        scaled_mtbf_s = mtbf_s * node_count(layout) / nodes
        result = checkpoint(
            params, scaled, storage, interval_s=interval_s, mtbf_s=scaled_mtbf_s, bytes_per_param=bytes_per_param
        )
        yield Scale(nodes, scaled_mtbf_s, result)


def node_count(layout: Layout) -> int:
    """Number of nodes of a layout."""
    return math.ceil(layout.tp * layout.pp * layout.dp / layout.gpus_per_node)


def writers(layout: Layout) -> int:
    """Return the number of GPUs that write: one replica, unless ZeRO shards the state over data-parallel ranks too."""
    return layout.tp * layout.pp * (layout.dp if layout.zero else 1)


def restore_amplification(layout: Layout, bytes_per_param: float = ADAM_BYTES_PER_PARAM) -> float:
    """Return bytes read per byte saved where each rank reads all that it holds.

    All is replicated without ZeRO, only the weights with stages 1 and 2: (2 DP + 12) / 14, and nothing with stage 3.
    """
    if layout.zero == 3:
        return 1.0
    weights = min(WEIGHT_BYTES_PER_PARAM, bytes_per_param) if layout.zero else bytes_per_param
    return (weights * layout.dp + bytes_per_param - weights) / bytes_per_param


def writer_skew_ratio(layout: Layout, bytes_per_param: float = ADAM_BYTES_PER_PARAM) -> float:
    """Return the bytes of data-parallel rank 0 relative to the others', where it writes what they all hold.

    With ZeRO 1 and 2 these are the weights: 1 + 2 DP / 12, so 1.333 on two ranks, which is not a straggler.
    """
    if layout.zero not in (1, 2) or layout.dp == 1 or bytes_per_param <= WEIGHT_BYTES_PER_PARAM:
        return 1.0
    return 1 + WEIGHT_BYTES_PER_PARAM * layout.dp / (bytes_per_param - WEIGHT_BYTES_PER_PARAM)


def young_s(write_s: float, mtbf_s: float) -> float:
    """Return the interval that loses least, to first order: √(2 δ M), in s (Young 1974).

    419 interruptions in 54 days (Llama 3, arXiv 2407.21783) are one in 3.093 h: with δ = 50.55 s 1061 s, by Daly 1028.
    """
    return math.sqrt(2 * write_s * mtbf_s)


def daly_s(write_s: float, mtbf_s: float) -> float:
    """Return the interval that loses least, to higher order, in s (Daly 2006, equation 37); M from δ = 2 M on."""
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    x = write_s / (2 * mtbf_s)
    return young_s(write_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - write_s


def best_interval_s(blocked_s: float, mtbf_s: float) -> float:
    """Interval that trains most under exponential failures, in s, from the start of a save to that of the next.

    The goodput's derivative is 0 where 1 − exp(−x) = x − δ/M, with x the interval over M: one root, between δ/M and
    δ/M + 1.

    >>> round(best_interval_s(50.55, 3.093 * 3600), 1)
    1078.1
    """
    low, high = blocked_s / mtbf_s, blocked_s / mtbf_s + 1
    for _ in range(60):  # to the last bit of a double
        middle = (low + high) / 2
        low, high = (low, middle) if middle - blocked_s / mtbf_s > -math.expm1(-middle) else (middle, high)
    return mtbf_s * high


def goodput_ratio(
    blocked_s: float, interval_s: float, mtbf_s: float, *, restore_s: float = 0, drain_s: float = 0
) -> float:
    """Share of the time that trains, exact for exponential failures: 0 where a save takes the interval.

    An interval that a failure repeats from its start takes M exp(R/M) (exp(W/M) − 1) on average, restoring R after each
    failure, also after those that occur meanwhile (Daly 2006, equation 20). A save protects `drain_s` after its end:
    until then a failure repeats the interval before, too, which costs as much as a restore that is longer by that.

    >>> round(goodput_ratio(0, 4, 3.093), 3)  # saves without cost, once in 4 h with a failure every 3.093 h
    0.489
    """
    exponent = (interval_s + restore_s + drain_s) / mtbf_s
    if exponent > _MOST_EXPONENT:
        return 0.0
    taken_s = mtbf_s * math.exp((restore_s + drain_s) / mtbf_s) * math.expm1(interval_s / mtbf_s)
    return max(0.0, interval_s - blocked_s) / taken_s


def check_positive(name: str, value: float) -> None:
    """Raise ConfigError if a value is not finite, or not above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} of {value:g} is not possible: it must be above 0")
