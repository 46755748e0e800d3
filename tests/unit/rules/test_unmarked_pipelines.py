"""Pipelines of ranks on devices without spans or a manifest: their stages, and a last stage that is slow."""

import pytest

from tests.support import gpu_hosts
from tests.support.gpu_hosts import GpuHost
from tracekit.analysis.parallelism import pipeline_stages
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.pipeline import UnbalancedStages
from tracekit.rules.rule import Severity

RANKS, MICRO_BATCHES, STEPS, KERNELS, KERNEL_US, HEAD_US = 3, 4, 3, 6, 100.0, 300.0
FORWARD, BACKWARD = "forward", "backward"
EVERYBODY, NEIGHBORS = "everybody", "neighbors"


def order(rank):
    """Actions of a rank under 1F1B: pairs of action and micro-batch."""
    warm_up = min(MICRO_BATCHES, RANKS - 1 - rank)
    actions = [(FORWARD, number) for number in range(warm_up)]
    for number in range(MICRO_BATCHES - warm_up):
        actions += [(FORWARD, warm_up + number), (BACKWARD, number)]
    return actions + [(BACKWARD, number) for number in range(MICRO_BATCHES - warm_up, MICRO_BATCHES)]


class Stage(GpuHost):
    """A rank that receives, computes and sends; its receives are posted before the sends of its first forwards."""

    def __init__(self, rank, groups, slowdown, slow_kernels, head):
        super().__init__(rank, RANKS)
        self.groups, self.slowdown, self.slow_kernels, self.head = groups, slowdown, slow_kernels, head

    def message(self, op, peer, start_us, end_us):
        where = f"{min(self.rank, peer)}_{max(self.rank, peer)}" if self.groups == NEIGHBORS else "pp"
        members = sorted((self.rank, peer)) if self.groups == NEIGHBORS else list(range(RANKS))
        args = {"Collective name": op, "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "Float"}
        args |= {"Group size": len(members), "Process Group Name": where, "Process Group Ranks": str(members)}
        args |= {"Process Group Description": "PIPELINE_MODEL_PARALLEL_GROUP"}
        args["Dst Rank" if op == "send" else "Src Rank"] = members.index(peer)
        stream = 20 + 2 * peer + (op == "send")
        self.free_us[stream] = start_us
        self.kernel("ncclDevKernel_SendRecv", end_us - start_us, stream=stream, after_us=start_us, **args)

    def compute(self, action, after_us):
        backward = action == BACKWARD
        end_us = 0.0
        for number in range(KERNELS):
            name = f"autograd::engine::evaluate_function: Mm{number}Backward0" if backward else f"aten::mm_{number}"
            with self.span(name, **({"Sequence number": number, "Fwd thread id": 1} if backward else {})):
                dur_us = KERNEL_US * (self.slowdown if number in self.slow_kernels else 1.0) * (1 + backward)
                _, end_us = self.kernel(f"{action}_{number}", dur_us, after_us=after_us)
        if self.head and not backward:
            _, end_us = self.kernel("vocabulary_gemm", HEAD_US)
        return end_us


def pipeline(folder, *, slow=RANKS - 1, slowdown=1.0, slow_kernels=range(KERNELS), head=False, groups=EVERYBODY):
    """Return a recorded 1F1B pipeline whose hosts launch everything ahead, and wait for the device after each step."""
    stages = [
        Stage(rank, groups, slowdown if rank == slow else 1.0, slow_kernels, head and rank == RANKS - 1)
        for rank in range(RANKS)
    ]
    for step in range(STEPS):
        begin_us = max(stage.host_us for stage in stages)
        for stage in stages:
            stage.host_us = begin_us
        _play(stages, step)
    pairs = [[rank, rank + 1] for rank in range(RANKS - 1)]
    members = pairs if groups == NEIGHBORS else [list(range(RANKS))]
    for stage in stages:
        named = [
            {"pg_name": "_".join(map(str, ranks)) if groups == NEIGHBORS else "pp", "ranks": ranks,
             "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "pg_size": len(ranks)}
            for ranks in members if stage.rank in ranks
        ]  # fmt: skip
        stage.write(folder, named)
    return load(folder, cache=False)


def _play(stages, step):
    """Record a step: each action of a rank as soon as its input is there, in the order of 1F1B."""
    ends, left = {}, {stage.rank: order(stage.rank) for stage in stages}
    with gpu_hosts.common_step(stages, step):
        while any(left.values()):
            for stage in stages:
                rank, actions = stage.rank, left[stage.rank]
                if not actions:
                    continue
                action, number = actions[0]
                source = rank - 1 if action == FORWARD else rank + 1
                has_source = 0 <= source < RANKS
                if has_source and (action, number, source) not in ends:
                    continue
                arrived_us = ends[action, number, source] if has_source else 0.0
                if has_source:
                    posted_us = stage.host_us + 2 * gpu_hosts.LAUNCH_US
                    stage.message("recv", source, min(posted_us, arrived_us - 1), arrived_us)
                end_us = stage.compute(action, arrived_us)
                sink = rank + 1 if action == FORWARD else rank - 1
                if 0 <= sink < RANKS:
                    stage.message("send", sink, end_us + 1, end_us + 11)
                ends[action, number, rank] = end_us + 11
                actions.pop(0)
        for stage in stages:
            stage.wait()


@pytest.mark.parametrize("groups", [EVERYBODY, NEIGHBORS])
def test_ranks_have_the_stages_in_which_they_pass_activations_on(groups, tmp_path):
    actions = pipeline(tmp_path, groups=groups).table(pipeline_stages.staged_actions)
    assert dict(actions.select("rank", "stage").unique().iter_rows()) == {rank: rank for rank in range(RANKS)}


def schedule_us(slowdown, slow=RANKS - 1):
    """Time of the actions of a step under 1F1B with a stage that is slower, and links without cost."""
    ends, free_us, left = {}, [0.0] * RANKS, {rank: order(rank) for rank in range(RANKS)}
    while any(left.values()):
        for rank, actions in left.items():
            source = rank - 1 if actions and actions[0][0] == FORWARD else rank + 1
            if not actions or (0 <= source < RANKS and (*actions[0], source) not in ends):
                continue
            action, number = actions.pop(0)
            taken_us = KERNELS * KERNEL_US * (1 + (action == BACKWARD)) * (slowdown if rank == slow else 1.0)
            ends[action, number, rank] = max(free_us[rank], ends.get((action, number, source), 0.0)) + taken_us
            free_us[rank] = ends[action, number, rank]
    return max(free_us)


@pytest.mark.parametrize(("slow", "slowdown"), [(RANKS - 1, 1.3), (1, 1.3), (0, 1.12), (1, 1.08)])
def test_a_stage_all_of_whose_kernels_are_slow_is_named_with_its_cost(slow, slowdown, tmp_path):
    (found,) = check(pipeline(tmp_path, slow=slow, slowdown=slowdown), [UnbalancedStages()]).findings
    assert (found.severity, found.ranks) == (Severity.WARNING, (slow,))
    longer_us = schedule_us(slowdown, slow) - schedule_us(1.0)
    assert found.cost_ns == pytest.approx(1000 * longer_us, rel=0.1)


def test_a_stage_one_of_whose_kernels_is_a_little_longer_is_no_slow_device(tmp_path):
    run = pipeline(tmp_path, slow=1, slowdown=1.5, slow_kernels=(0,))  # 8% of the stage
    assert check(run, [UnbalancedStages()]).findings == ()


def test_a_last_stage_with_an_output_layer_is_no_slow_stage(tmp_path):
    assert check(pipeline(tmp_path, head=True), [UnbalancedStages()]).findings == ()
