"""What blocks of memory are for, against the categories of torch's own memory profiler on the same recording.

torch.profiler sees tensors and their versions; the categories here only see call stacks and lifetimes.
"""

import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from tracekit.model import schema
from tracekit.model.trace import MemorySnapshot
from tracekit.replay.allocator import snapshot_facts

torch = pytest.importorskip("torch")

ALLOC, REQUEST = 0, 1
BACKWARD = "the backward pass"
_FRAME = re.compile(r"(.*\.py)\((\d+)\): (.*)")
SAME = {
    "PARAMETER": {"parameters"}, "GRADIENT": {"gradients"}, "OPTIMIZER_STATE": {"optimizer"},
    "ACTIVATION": {"activations"}, "TEMPORARY": {"temporaries"}, "AUTOGRAD_DETAIL": {"temporaries"},
}  # fmt: skip


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(64, 256), torch.nn.Linear(256, 256), torch.nn.Linear(256, 8)]
        )

    def forward(self, x):
        first, second, last = self.layers
        return last(torch.nn.functional.gelu(second(torch.relu(first(x)))))


def recorded():
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True, record_shapes=True, with_stack=True) as profiler:
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(3):
            loss = net(torch.randn(128, 64)).square().mean()
            optimizer.zero_grad()
            with torch.profiler.record_function(BACKWARD):
                loss.backward()
            optimizer.step()
    return profiler


def frames(path) -> tuple[tuple[str, str], ...]:
    """Return file and function of each frame, the innermost first, as a snapshot with C++ frames has them."""
    found = []
    for event in reversed(path):
        try:
            name = event.name
        except UnicodeDecodeError:  # torch's name of a built-in function may not be text
            continue
        if (python := _FRAME.match(name)) is not None:
            file = f"/site-packages/{python[1]}" if python[1].startswith("torch/") else f"/home/me/{python[1]}"
            found.append((file, python[3]))
        elif name.startswith("autograd::engine::evaluate_function"):
            found.append(("??", "torch::autograd::Engine::evaluate_function(...)"))
        elif "AccumulateGrad" in name:
            found.append(("??", "torch::autograd::AccumulateGrad::apply(...)"))
        elif name.startswith("aten::"):
            found.append(("??", f"at::_ops::{name[6:]}::call(...)"))
    return tuple(found)


def moves(profiler):
    """Return the allocator's events in order, and when each backward pass begins.

    Of each event time, address, size (negative: freed), allocation id and frames.
    """
    found, begins = [], []

    def walk(event, path):
        if "Allocation" in str(event.tag):
            fields = event.typed[1]
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size, fields.allocation_id, frames(path)))
        if "TorchOp" in str(event.tag) and event.name == BACKWARD:
            begins.append(event.start_time_ns)
        for child in event.children:
            walk(child, [*path, event])

    for root in profiler.profiler.kineto_results.experimental_event_tree():
        walk(root, [])
    return sorted(found, key=lambda move: move[0]), begins


def snapshot_of(rows) -> tuple[MemorySnapshot, SimpleNamespace, SimpleNamespace]:
    stacks = {stack: number for number, stack in enumerate(dict.fromkeys(row[4] for row in rows))}
    lines = {line: number for number, line in enumerate(dict.fromkeys(line for stack in stacks for line in stack))}
    snapshot = MemorySnapshot(
        "recorded",
        stacks=schema.STACKS.conform(
            pl.DataFrame(
                [(n, depth, lines[line]) for stack, n in stacks.items() for depth, line in enumerate(stack)],
                schema=["stack", "depth", "frame"],
                orient="row",
            )
        ),
        frames=schema.FRAMES.conform(
            pl.DataFrame(
                [(n, name, file, 1) for (file, name), n in lines.items()],
                schema=["frame", "name", "file", "line"],
                orient="row",
            )
        ),
    )
    sizes = np.array([row[2] for row in rows])
    history = SimpleNamespace(
        device=0,
        start=(),
        action=np.where(sizes > 0, ALLOC, REQUEST),
        address=np.array([row[1] for row in rows]),
        at_ns=np.array([row[0] for row in rows]),
        stack=np.array([stacks[row[4]] for row in rows]),
    )
    return snapshot, history, SimpleNamespace(moved_bytes=sizes)


def of_torch(profiler) -> dict[int, set[str]]:
    """Return the categories that torch gives the versions of each allocation's tensor."""
    profile = profiler._memory_profile()
    found: dict[int, set[str]] = {}
    for _, _, (key, version), _ in profile.timeline:
        storage = getattr(key, "storage", None)
        if storage is not None and (category := profile._categories.get(key, version)) is not None:
            found.setdefault(storage.allocation_id, set()).add(category.name)
    return found


def test_categories_agree_with_those_of_torchs_memory_profiler():
    profiler = recorded()
    rows, begins = moves(profiler)
    names = of_torch(profiler)
    agreed, differing = Counter(), Counter()
    for block in snapshot_facts.block_categories(*snapshot_of(rows)).iter_rows(named=True):
        stated = names.get(rows[block["start"]][3], set())
        if len(stated) != 1 or (name := next(iter(stated))) not in SAME:
            continue  # torch knows none, several over time, or an input of the program
        start_ns = rows[block["start"]][0]
        end_ns = rows[block["end"]][0] if block["end"] < len(rows) else float("inf")
        # To torch, whatever the loss depends on is an activation, and what Adam divides by is a parameter; here a
        # block that is freed before the backward pass, or within the optimizer's step, is temporary.
        if name == "ACTIVATION" and not any(start_ns < at < end_ns for at in begins):
            continue
        if name == "PARAMETER" and start_ns > begins[0]:
            continue
        (agreed if block["category"] in SAME[name] else differing)[name, block["category"]] += block["bytes"]
    assert {name for name, _ in agreed} == set(SAME)
    # The loss is computed outside of any module's forward: its few bytes are not attributed.
    assert set(differing) <= {("ACTIVATION", "unknown"), ("TEMPORARY", "unknown")}
    assert agreed.total() >= 0.99 * (agreed.total() + differing.total())
