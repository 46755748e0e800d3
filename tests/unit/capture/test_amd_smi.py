"""Counters of an AMD GPU, read from a stand-in for AMD SMI; its names are checked against the package's source."""

import ast
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.capture.test_device_metrics import recorded
from tracekit.capture.rank_info import DeviceIdentity
from tracekit.conventions import device_metrics

STAND_IN = Path(__file__).parents[2] / "support" / "stand_ins" / "amd"
DEVICE = DeviceIdentity(None, "0000:c1:00.0", is_amd=True)


@pytest.fixture
def amdsmi(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    yield importlib.import_module("amdsmi")
    sys.modules.pop("amdsmi", None)


def test_a_step_has_the_counters_of_an_amd_gpu(amdsmi: ModuleType) -> None:
    values = recorded(device=DEVICE)
    assert {name: value for name, value in values.items() if not name.startswith(("min_", "max_"))} == {
        "sm_clock_mhz": 2100.0, "memory_clock_mhz": 1300.0, "power_w": 712.0, "temperature_c": 83.0,
        "device_utilization_ratio": 0.97, "device_memory_utilization_ratio": None, "power_limit_w": 750.0,
        "ecc_corrected_errors": 4.0, "ecc_uncorrected_errors": 1.0, "remapped_rows": None, "pending_row_remap": None,
        "throttle_reasons": device_metrics.POWER_CAP | device_metrics.HW_THERMAL, "device_samples": 1,
    }  # fmt: skip


def test_a_gpu_without_violation_status_has_no_throttle_reasons(
    amdsmi: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    amdsmi.LACKS.add("violations")
    values = recorded(device=DEVICE)
    assert values["throttle_reasons"] is None
    assert values["sm_clock_mhz"] == 2100
    assert capfd.readouterr().err == ""


def test_the_stand_in_has_the_names_and_parameters_of_the_package(amdsmi: ModuleType) -> None:
    """The package cannot be imported without ROCm, so its source is read."""
    try:
        source = importlib.metadata.distribution("amdsmi").locate_file("amdsmi/amdsmi_interface.py")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs amdsmi")
    own, real = (_definitions(Path(str(path))) for path in (STAND_IN / "amdsmi.py", source))
    for name, parameters in own.items():
        if name.startswith("amdsmi_"):
            assert real[name][: len(parameters)] == parameters, name
        elif not name.endswith("Exception"):
            assert set(parameters) <= set(real[name]), name


def _definitions(path: Path) -> dict[str, list[str]]:
    """Return the parameters of each public function and the members of each class."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = {node.name: [arg.arg for arg in node.args.args] for node in body if isinstance(node, ast.FunctionDef)}
    classes = {
        node.name: [
            target.id
            for line in node.body
            if isinstance(line, ast.Assign)
            for target in line.targets
            if isinstance(target, ast.Name)
        ]
        for node in body
        if isinstance(node, ast.ClassDef)
    }
    return {name: names for name, names in {**functions, **classes}.items() if not name.startswith("_")}
