"""Executors: the same tables and reports from threads, processes and Dask, also when workers are killed."""

import functools
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from tests.support import worker_facts
from tests.support.cli_runner import ROOT, only_line, tracekit
from tests.support.selection import others_in_accuracy
from tests.support.worker_facts import broken, killing, process
from tracekit import executors
from tracekit.errors import ConfigError
from tracekit.executors import open_executor
from tracekit.executors.processes import ProcessesPerPass
from tracekit.ingest import loader
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.rules import engine

SAMPLES = ("demo-fsdp2", "parallelism/pipeline-1f1b")
KINDS = ("processes", "dask")


@pytest.fixture(scope="module", params=KINDS)
def executor(request):
    if request.param == "dask":
        pytest.importorskip("distributed", reason="needs the extra [cluster]")
    with open_executor(request.param, workers=2) as opened:
        yield opened


@pytest.fixture
def kills(tmp_path, monkeypatch):
    """Return a function that says how many workers are killed while they measure rank 1."""

    def prepare(count):
        for number in range(count):
            (tmp_path / f"kill{number}").touch()

    monkeypatch.setenv(worker_facts.KILLS, str(tmp_path))
    return prepare


def rows(table):
    """Return the rows in one order: tables that several ranks make have none."""
    return sorted(table.rows(), key=repr)


def drawn_run(executor, ranks=4):
    read = [functools.partial(worker_facts.drawn, rank) for rank in range(ranks)]
    return Run("drawn", [Source(rank, 0, f"rank{rank}", 1, read[rank]) for rank in range(ranks)], executor=executor)


@pytest.mark.accuracy  # `check` prints the same by processes, which measure the same tables of drawn traces
@pytest.mark.parametrize(("executor", "sample"), itertools.product(KINDS, SAMPLES), indirect=["executor"])
def test_all_tables_of_a_check_are_those_of_threads(executor, sample):
    folder = ROOT / "sample_traces" / sample
    runs = [loader.load(folder), loader.load(folder, executor=executor)]
    reports = [engine.check(run) for run in runs]
    expected, measured = (run.measured_tables for run in runs)
    assert measured.keys() == expected.keys()
    assert [name for name in expected if rows(measured[name]) != rows(expected[name])] == []
    assert [vars(f) | {"evidence": None} for f in reports[1].findings] == [
        vars(f) | {"evidence": None} for f in reports[0].findings
    ]


def test_traces_are_measured_by_other_processes(executor):
    pids = drawn_run(executor).table(process)["pid"].unique().to_list()
    assert os.getpid() not in pids
    assert len(pids) <= 2


def test_a_server_measures_many_traces_in_processes_that_stop_after_the_pass(monkeypatch):
    run = drawn_run(ProcessesPerPass())
    assert run.table(process)["pid"].unique().to_list() == [os.getpid()]
    monkeypatch.setattr(executors, "PROCESSES_FROM", 4)
    monkeypatch.setattr(executors, "processors", lambda: 2)
    pids = drawn_run(ProcessesPerPass()).table(process)["pid"].unique().to_list()
    assert os.getpid() not in pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_fact_without_a_name_is_measured_in_this_process(executor):
    table = drawn_run(executor).table(lambda trace: pl.DataFrame({"pid": [os.getpid()]}))
    assert set(table["pid"]) == {os.getpid()}


def test_an_error_in_a_fact_is_raised(executor):
    with pytest.raises(ZeroDivisionError, match="rank 0"):
        drawn_run(executor).table(broken)
    assert drawn_run(executor).table(process).height == 4


def test_a_damaged_trace_is_an_issue_of_the_run(executor, tmp_path):
    for rank in (0, 1):
        name = f"rank{rank:05}.pt.trace.json.gz"
        (tmp_path / name).write_bytes((ROOT / "sample_traces" / "demo-fsdp2" / name).read_bytes())
    run = loader.load(tmp_path, cache=False, executor=executor)
    (tmp_path / "rank00001.pt.trace.json.gz").write_bytes(b"gone")
    assert set(run.table(process)["rank"]) == {0}
    assert run.data_quality["kind"].to_list() == ["unreadable"]


def test_the_tasks_of_a_killed_worker_are_repeated(kills):
    kills(2)
    with open_executor("processes", workers=2) as executor:
        run = drawn_run(executor)
        assert run.table(killing)["seen"].to_list() == [0, 1, 2, 3]
        assert run.data_quality.is_empty()


def test_a_trace_whose_workers_are_always_lost_is_an_issue_of_the_run(kills):
    kills(9)
    with open_executor("processes", workers=2) as executor:
        run = drawn_run(executor)
        assert run.table(killing)["seen"].to_list() == [0, 2, 3]
        assert run.data_quality.select("rank", "kind").rows() == [(1, "unreadable")]
        assert "rank1: 3 workers that measured it were lost" in run.data_quality["message"].item()
        assert run.table(process).height == 3


@pytest.mark.accuracy  # Dask does it
def test_dask_repeats_the_tasks_of_a_killed_worker(kills):
    pytest.importorskip("distributed", reason="needs the extra [cluster]")
    kills(1)
    with open_executor("dask", cluster="local:2") as executor:
        assert drawn_run(executor).table(killing)["seen"].to_list() == [0, 1, 2, 3]


def test_a_running_scheduler_is_joined_and_left_running():
    distributed = pytest.importorskip("distributed", reason="needs the extra [cluster]")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        address = cluster.scheduler_address
        for _ in range(2):
            with open_executor("dask", cluster=address) as executor:
                assert executor.workers == 1
                assert drawn_run(executor).table(process).height == 4


def test_slurm_starts_workers_as_jobs(tmp_path, monkeypatch):
    """A stand-in for sbatch runs the job's script on this machine, as Slurm would on another."""
    pytest.importorskip("dask_jobqueue", reason="needs the extra [cluster]")
    commands = tmp_path / "bin"
    commands.mkdir()
    script, log = tmp_path / "job.sh", tmp_path / "log"
    _program(commands / "sbatch", f'cp "$1" {script}\nsetsid sh {script} >{log} 2>&1 &\necho "$!"\n')
    _program(commands / "scancel", 'kill -- "-$1"\n')
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    monkeypatch.chdir(tmp_path)
    with open_executor("dask", cluster="slurm:1") as executor:
        pids = set(drawn_run(executor).table(process)["pid"])
    assert "#SBATCH --mem=4G" in script.read_text()
    assert os.getpid() not in pids


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "processes", "cluster": "local:2"}, "a cluster needs --executor dask"),
        ({"kind": "dask", "cluster": "local:2", "workers": 2}, "says how many workers"),
        ({"kind": "dask", "cluster": "local:none"}, "expected local:N, slurm:N, or a scheduler"),
        ({"kind": "dask", "cluster": "tcp://127.0.0.1:9"}, "no scheduler answers"),
        ({"kind": "magic"}, "expected threads, processes or dask"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused(options, message, monkeypatch):
    if options["kind"] == "dask":
        dask_cluster = pytest.importorskip("tracekit.executors.dask_cluster", reason="needs the extra [cluster]")
        monkeypatch.setattr(dask_cluster, "_FIRST_WORKER_S", 1.0)
    with pytest.raises(ConfigError, match=message), open_executor(**options):
        pass


@pytest.mark.parametrize("command", others_in_accuracy(["check", "summary", "query"], ["check"]))
def test_commands_print_the_same_with_processes(command, tmp_path):
    run = ROOT / "sample_traces" / "faults" / "healthy-fsdp2"
    more = ["SELECT rank, kind, sum(dur_ns) AS total FROM activities GROUP BY ALL ORDER BY ALL"] * (command == "query")
    printed = [
        tracekit(command, run, *more, "--format", "json", "--executor", kind, "--workers", 2)
        for kind in ("threads", "processes")
    ]
    assert printed[0].returncode == printed[1].returncode == 0
    assert json.loads(printed[0].stdout)
    assert printed[1].stdout == printed[0].stdout


def test_wrong_executor_options_end_with_one_line():
    done = tracekit("summary", ROOT / "sample_traces" / "demo-yafsdp", "--cluster", "local:2")
    assert done.returncode == 2
    assert "a cluster needs --executor dask" in only_line(done)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_process_that_started_them(number):
    """A killed server cannot stop its workers, which wait for tasks."""
    program = (
        "import multiprocessing, os, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from tracekit.executors import worker_start\n"
        "context = multiprocessing.get_context('spawn')\n"
        "pool = ProcessPoolExecutor(1, mp_context=context, initializer=worker_start.prepare, initargs=(1,))\n"
        "print(pool.submit(os.getpid).result(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.send_signal(number)
    deadline = time.monotonic() + 120
    while is_running(worker):
        assert time.monotonic() < deadline, "the worker goes on"
        time.sleep(0.05)


def is_running(process_id):
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
