"""Topology files: the examples, what each key changes, and what is no topology."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cli_runner import ROOT, tracekit
from tracekit.errors import InputError
from tracekit.plan import hardware, topology

EXAMPLES = sorted((ROOT / "examples" / "topologies").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_plans_layouts_and_trainings(path: Path) -> None:
    cluster = topology.read(path)
    assert cluster.gpus is not None
    options = ("--model", "7b", "--topology", path, "--format", "json")
    done = tracekit("plan", "layout", *options, "--count", "1")
    assert json.loads(done.stdout)["gpus"] == cluster.gpus, done.stderr
    done = tracekit("plan", "train", *options, "--tokens", "1e12")
    assert json.loads(done.stdout)["gpus"] == cluster.gpus, done.stderr


def test_an_nvlink_domain_may_be_larger_than_a_node() -> None:
    cluster = topology.read(ROOT / "examples" / "topologies" / "gb200_nvl72.toml")
    assert (cluster.domain_gpus, cluster.gpus) == (72, 576)
    # 18 trays of four adapters.
    assert cluster.hardware.network_bytes_per_s == pytest.approx(72 * 50e9 * hardware.NETWORK_RATIO)
    assert cluster.hardware.node_bytes_per_s == pytest.approx(900e9 * hardware.LINK_RATIO)


def test_what_a_file_leaves_out_is_that_of_the_device(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text('device = "a100-80"\ngpus_per_node = 4\n')
    cluster, device = topology.read(path), hardware.find("a100-80")
    assert cluster.gpus is None
    assert cluster.hardware.node_bytes_per_s == device.node_bytes_per_s
    assert cluster.hardware.achieved_ratio == device.achieved_ratio
    done = tracekit("plan", "layout", "--model", "7b", "--topology", path)
    assert done.returncode == 2
    assert "--gpus" in done.stderr


def test_slower_rails_make_a_step_longer(tmp_path: Path) -> None:
    steps = []
    for rate in ("50e9", "5e9"):
        path = tmp_path / f"{rate}.toml"
        path.write_text(f'device = "h100-80"\ngpus_per_node = 8\nnodes = 32\nrail_bytes_per_s = {rate}\n')
        done = tracekit("plan", "layout", "--model", "70b", "--topology", path, "--count", "1", "--format", "json")
        steps.append(json.loads(done.stdout)["layouts"][0]["step_seconds"])
    assert steps[1] > steps[0]


def test_a_checkpoint_is_written_to_the_storage_of_the_topology(tmp_path: Path) -> None:
    path = ROOT / "examples" / "topologies" / "a100_8.toml"
    size = ("plan", "checkpoint", "--params", "1e12", "--tp", "8", "--pp", "64", "--interval", "4h", "--format", "json")
    by_file = json.loads(tracekit(*size, "--topology", path).stdout)
    by_options = json.loads(tracekit(*size, "--write-bandwidth", "273e9", "--read-bandwidth", "1e12").stdout)
    assert by_file == by_options
    assert json.loads(tracekit(*size, "--topology", path, "--write-bandwidth", "1e9").stdout) != by_file


@pytest.mark.parametrize(
    "text",
    [
        "", "device = 3", 'device = "a100-80"', 'device = "none"\ngpus_per_node = 8', "device = [",
        'device = "a100-80"\ngpus_per_node = 0', 'device = "a100-80"\ngpus_per_node = 8\nrail_bytes_per_s = -1',
        'device = "a100-80"\ngpus_per_node = 8\nlink_domain_gpus = 12',
        'device = "a100-80"\ngpus_per_node = 8\nother = 1',
        'device = "a100-80"\ngpus_per_node = 8\nlink_bytes_per_s = nan',
    ],
)  # fmt: skip
def test_what_is_no_topology_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    done = tracekit("plan", "train", "--model", "7b", "--tokens", "1e12", "--gpus", "64", "--topology", path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert str(path) in done.stderr or "unknown hardware" in done.stderr


def test_a_device_beside_a_topology_is_refused() -> None:
    done = tracekit("plan", "layout", "--model", "7b", "--topology", EXAMPLES[0], "--device", "h200")
    assert done.returncode == 2
    assert "--device" in done.stderr


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        topology.read(tmp_path / "none.toml")


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16), st.floats(1e9, 1e12))
def test_the_network_of_a_domain_is_that_of_its_adapters(per_node: int, times: int, rails: int, rate: float) -> None:
    stated = topology.TopologyFile(
        "h100-80", per_node, link_domain_gpus=per_node * times, rails=rails, rail_bytes_per_s=rate, network_ratio=1.0
    )
    cluster = topology.topology(stated, "test")
    assert cluster.hardware.network_bytes_per_s == pytest.approx(times * rails * rate)
