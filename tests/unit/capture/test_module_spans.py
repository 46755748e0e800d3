"""`Recorder(modules=True)`: spans of the modules in recorded windows only, and work tied to them."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest

import tracekit

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn.modules import module as module_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tracekit.analysis.compute import call_paths  # noqa: E402
from tracekit.analysis.host import ops  # noqa: E402
from tracekit.capture.recorder import Recorder  # noqa: E402
from tracekit.model.trace import Trace  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)
        self.act = torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.inner(x)) + x


class Model(torch.nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(16, 4)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


class Refused(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("refused")


def record(model: torch.nn.Module, out: Path, *, step: Callable[[torch.nn.Module], None] | None = None) -> Trace:
    """Train for four steps, of which steps 1 and 2 are recorded, and return the trace."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = torch.nn.MSELoss()
    with Recorder(out, steps="1:3", warmup=1, device="cpu", modules=True, memory=False) as recorder:
        for number in range(4):
            is_hooked = bool(module_hooks._global_forward_pre_hooks)
            assert is_hooked == (number in (1, 2))
            if step is not None:
                step(model)
            loss_of(model(torch.ones(8, 16)), torch.zeros(8, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    assert not module_hooks._global_forward_hooks
    return tracekit.load(out, cache=False).trace(0)


def calls(trace: Trace) -> dict[str, int]:
    return dict(call_paths.module_calls(trace).iter_rows())


NAMES = ("Model", "Model.head", *(f"Model.layers.{i}{part}" for i in range(2) for part in ("", ".inner", ".act")))


def test_each_module_has_a_span_per_call_and_its_work_belongs_to_it(tmp_path: Path) -> None:
    trace = record(Model(), tmp_path)
    assert calls(trace) == dict.fromkeys([*NAMES, "MSELoss"], 2)
    products = trace.ops.with_columns(call_paths.op_modules(trace)).filter(
        pl.col("name").is_in(["aten::addmm", "aten::mm"])
    )
    counts = dict(products.group_by("module").len().iter_rows())
    # A forward product and two gradients a step; the first layer's input needs none.
    assert counts == {"Model.layers.0.inner": 4, "Model.layers.1.inner": 6, "Model.head": 6}
    rows = {row["module"]: row for row in ops.modules(trace).iter_rows(named=True)}
    assert rows["Model.layers"]["calls"] == 0
    assert rows["Model"]["total_flops"] == sum(row["flops"] for row in rows.values()) > 0
    assert rows[None]["host_ns"] > 0


def test_what_checkpointing_repeats_belongs_to_the_module_that_repeats_it(tmp_path: Path) -> None:
    found = calls(record(Model(checkpointed=True), tmp_path))
    assert (found["Model"], found["Model.layers.0"], found["Model.layers.1.inner"], found["Model.head"]) == (2, 4, 4, 2)


def test_a_wrapped_model_has_the_names_of_the_model(tmp_path: Path) -> None:
    assert set(calls(record(torch.nn.DataParallel(Model()), tmp_path))) == {*NAMES, "MSELoss"}


def test_a_subclass_of_a_wrapper_is_a_wrapper(tmp_path: Path) -> None:
    class OwnParallel(torch.nn.DataParallel):
        """A wrapper as trainings write them."""

    assert set(calls(record(OwnParallel(Model()), tmp_path))) == {*NAMES, "MSELoss"}


def test_a_module_that_raises_ends_its_span(tmp_path: Path) -> None:
    def failing(_model: torch.nn.Module) -> None:
        with pytest.raises(ValueError, match="refused"):
            torch.nn.Sequential(torch.nn.Linear(16, 16), Refused())(torch.ones(8, 16))

    found = calls(record(Model(), tmp_path, step=failing))
    assert (found["Sequential"], found["Sequential.1"], found["Model"]) == (2, 2, 2)


def test_the_model_is_not_changed(tmp_path: Path) -> None:
    model = Model()
    before = set(vars(model.head))
    record(model, tmp_path)
    assert set(vars(model.head)) == before
    assert type(pickle.loads(pickle.dumps(copy.deepcopy(model)))) is Model  # our own bytes


def test_a_compiled_model_is_recorded_around_and_not_traced_with_the_hooks(tmp_path: Path) -> None:
    compiled = torch.compile(Model(), backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = calls(record(compiled, tmp_path))
    assert found["Model"] == 2
    assert found["MSELoss"] == 2


@pytest.fixture(autouse=True)
def without_hooks() -> Iterator[None]:
    yield
    assert not module_hooks._global_forward_pre_hooks
