"""One table says what a strategy stores and communicates; whoever implements one is named in it, and nobody else."""

import pytest

from instrumented_trainers import parallelism
from tests.support.wording import Wording
from tracekit.analysis.parallelism import workload
from tracekit.conventions.strategies import (
    ALIASES,
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    DDP,
    FSDP2,
    GRADIENTS,
    HSDP,
    OPTIMIZER,
    PARAMETERS,
    REDUCE_SCATTER,
    STRATEGIES,
    YAFSDP,
    ZERO1,
    ZERO_STAGES,
    Layout,
    Strategy,
    ring_hops,
)
from tracekit.plan import memory
from tracekit.plan.hardware import HARDWARE
from tracekit.plan.models import MODELS
from tracekit.replay.graph import strategies as what_if
from tracekit.simulate.engine import SCHEDULES
from tracekit.simulate.job import STRATEGIES as JOB_STRATEGIES
from tracekit.simulate.job import Job


def names(flag: str) -> set[str]:
    return {strategy.name for strategy in STRATEGIES.values() if getattr(strategy, flag)}


def test_who_implements_a_strategy_is_named_in_the_table() -> None:
    assert set(parallelism.STRATEGIES) == names("trained")
    assert set(SCHEDULES) == set(JOB_STRATEGIES) == names("simulated")
    assert set(what_if.NAMES) == names("replayed")
    assert {workload.DDP, workload.FSDP1, workload.FSDP2, workload.YAFSDP} == names("span_prefix")


def test_an_alias_names_one_strategy_and_is_no_name() -> None:
    aliases = [alias for strategy in STRATEGIES.values() for alias in strategy.aliases]
    assert len(aliases) == len(set(aliases)) == len(ALIASES)
    assert not set(aliases) & set(STRATEGIES)


# arXiv 1910.02054, sections 5 and 7: K = 12; 2 Ψ of traffic for data parallelism and stages 1 and 2, 3 Ψ for stage 3.
@pytest.mark.parametrize(
    ("stage", "stored", "traffic"),
    [(0, (800, 800, 800), 2), (1, (800, 800, 100), 2), (2, (800, 100, 100), 2), (3, (100, 100, 100), 3)],
)
def test_zero_stages_store_and_send_what_the_paper_says(stage: int, stored: tuple[int, ...], traffic: int) -> None:
    strategy = ZERO_STAGES[stage]
    assert tuple(strategy.per_rank(kind, 800, 8) for kind in (PARAMETERS, GRADIENTS, OPTIMIZER)) == stored
    assert strategy.traffic_factor() == traffic


def test_yafsdp_stores_18_bytes_a_parameter_and_buffers_of_12() -> None:
    size = YAFSDP.state_bytes
    assert size.parameters + size.gradients + size.optimizer == 18
    assert YAFSDP.buffer_bytes == 12
    assert sum(memory.state_bytes(7e9, YAFSDP, ranks=4)) == 18 * 7e9 / 4


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=lambda strategy: strategy.name)
def test_what_is_sharded_reaches_all_ranks_and_gradients_are_reduced_once(strategy: Strategy) -> None:
    ops = {collective.op for collective in strategy.collectives if not collective.of_shard}
    assert bool(ops & {ALL_GATHER, BROADCAST}) == bool(strategy.sharded)
    assert (ALL_REDUCE in ops) == (strategy in (DDP, ZERO1))
    assert (REDUCE_SCATTER in ops) == (ALL_REDUCE not in ops)
    assert sum(strategy.per_rank(kind, 8, 4) for kind in strategy.sharded) == 2 * len(strategy.sharded)


@pytest.mark.parametrize(("strategy", "shards"), [(DDP, 1), (FSDP2, 16), (HSDP, 8), (YAFSDP, 16)])
def test_the_simulator_shards_over_what_the_table_says(strategy: Strategy, shards: int) -> None:
    assert Job(strategy.name, MODELS["tiny"], HARDWARE["a100-80"], gpus=16, seq=128).shards == shards


def test_an_all_reduce_passes_a_ring_twice() -> None:
    assert ring_hops(ALL_REDUCE, 8) == 2 * ring_hops(ALL_GATHER, 8) == 14


def test_the_world_is_as_large_as_its_axes_together(wording: Wording) -> None:
    assert Layout(pp=2, dp_replicate=3, dp_shard=4, cp=5, tp=6).world_size == 720
    assert Layout(dp_shard=4, ep=2).world_size == 4
    with wording.raises(ValueError):
        Layout(dp_shard=4, ep=3)
    with pytest.raises(ValueError, match="tp = 0"):
        Layout(tp=0)


def test_zero1_of_torch_stores_whole_weights_and_sends_half_as_much_again_as_the_paper_says() -> None:
    assert not ZERO1.shards_parameters
    assert (ZERO1.traffic_factor(), ZERO_STAGES[1].traffic_factor()) == (3, 2)


def test_ranks_are_numbered_with_tensor_parallel_ranks_next_to_each_other() -> None:
    layout = Layout(pp=2, dp_shard=2, tp=2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [dict(layout.coordinate(rank))["dp_shard"] for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_ranks_that_differ_in_pp_cp_or_tp_train_on_the_same_batch() -> None:
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    assert layout.data_ranks == 4
    assert {layout.data_rank(rank) for rank in layout.groups("pp")[5]} == {layout.data_rank(5)}
    assert sorted(layout.data_rank(rank) for rank in range(32)) == sorted(list(range(4)) * 8)


def test_experts_are_divided_among_ranks_that_shard() -> None:
    assert Layout(pp=2, dp_shard=4, ep=2).groups("ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Layout(dp_shard=2, cp=2, tp=2, ep=4).groups("ep") == [[0, 2, 4, 6], [1, 3, 5, 7]]
