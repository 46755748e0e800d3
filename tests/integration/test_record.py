"""`tracekit record -- …` on unmodified trainings: each behaves as without it, and a run is recorded."""

import functools
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tracekit
from tests.integration import recorded
from tests.integration.recorded import Done, command, do, finish, launched, load, metrics, script, start, steps_by_rank
from tests.support import ports
from tests.support.python_path import REPOSITORY
from tests.support.selection import others_in_accuracy
from tracekit.analysis.compute import device_counters
from tracekit.analysis.host import ops

WITHOUT_THE_ANALYSIS = """
import sys
sys.modules.update(dict.fromkeys(["polars", "msgspec", "rich", "typer", "pyarrow", "duckdb"]))
from tracekit.capture.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def losses(done: Done) -> list[str]:
    """Return what each rank prints of its loss at the end, in full precision."""
    return sorted(line for line in done.out.splitlines() if re.match(r"(rank \d+: .*)?loss \S+$", line))


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Done, Path]:
    """DDP on two ranks, alone and recorded, by torch and the standard library alone."""
    folder = tmp_path_factory.mktemp("ddp")
    words = (2, "plain_ddp.py", "--steps", "16", "--accumulate", "2")
    training = recorded.under_torchrun(*words)
    record = command("record", "--steps", "4:7", "--every", "8", "--out", "runs/ddp", "--", *training)
    bare = [sys.executable, "-c", WITHOUT_THE_ANALYSIS, *record[4:]]
    return do(launched(*words), folder), do(bare, folder), folder / "runs" / "ddp"


def test_a_recorded_training_behaves_as_without_the_recorder(ddp: tuple[Done, Done, Path]) -> None:
    alone, done, _ = ddp
    assert done.code == alone.code == 0, done.err
    assert losses(done) == losses(alone)
    assert len(losses(done)) == 2
    assert "USDT" not in done.err


def test_the_recorder_needs_torch_and_the_standard_library_only(ddp: tuple[Done, Done, Path]) -> None:
    _, done, _ = ddp
    assert done.said == [
        "tracekit: recorded ranks 0, 1 in runs/ddp",
        "tracekit: next: tracekit check runs/ddp, tracekit dashboard runs",
    ]


def test_all_ranks_are_profiled_in_the_same_optimizer_steps(ddp: tuple[Done, Done, Path]) -> None:
    run = load(ddp[2])
    assert steps_by_rank(run) == {0: [12, 13, 14], 1: [12, 13, 14]}  # the second window comes last
    assert [source.window for source in run.sources] == [0, 0, 1, 1]
    assert run.trace(1, 0).steps["step"].to_list() == [4, 5, 6]
    assert [window["first_step"] for window in run.manifest["windows"]] == [4, 12]
    assert not run.data_quality.filter(run.data_quality["kind"] != "no_checkpoint_log").height


def test_every_step_has_its_metrics(ddp: tuple[Done, Done, Path]) -> None:
    for rank in (0, 1):
        rows = metrics(ddp[2], rank)
        assert [row["step"] for row in rows] == list(range(16))
        assert all(row["loss"] > 0 and row["data_wait_ns"] > 0 for row in rows[1:])
        assert "step_time_ns" not in rows[0]  # it was under way when the recorder learned of it
        assert all(row["step_time_ns"] > row["data_wait_ns"] for row in rows[1:])


def test_the_verdict_follows_on_stderr_where_the_analysis_is_installed(tmp_path: Path) -> None:
    training = launched(2, "plain_fsdp2.py", "--steps", "9", "--accumulate", "2", "--save-at", "6")
    done = do(command("--steps", "5:8", "--out", "run", "--", *training), tmp_path)
    assert done.code == 0, done.err
    assert "\ntime  " in done.err
    assert "tracekit" not in done.out
    run = load(tmp_path / "run")
    assert steps_by_rank(run) == {0: [5, 6, 7], 1: [5, 6, 7]}
    saves = [json.loads(line) for line in (tmp_path / "run" / "rank00001.checkpoint.jsonl").read_text().splitlines()]
    assert {(row["operation"], row["step"], row["call"]) for row in saves} == {("save", 6, "dcp.save")}
    assert {"plan", "write", "total"} <= {row["stage"] for row in saves}
    collectives = run.trace(0).collectives
    assert set(collectives["op"]) >= {"all_gather", "reduce_scatter"}
    report = tracekit.check(run)
    issues = {finding.subject for finding in report.findings if finding.code.startswith("DATA")}
    assert issues <= {"clock_skew"}  # which a busy machine may show


@pytest.mark.parametrize(
    ("library", "name", "batches"),
    [
        # test_adapter_huggingface.py records a Trainer on two ranks every day.
        pytest.param("transformers", "plain_huggingface.py", "2", marks=pytest.mark.accuracy),
        # It steps by a closure, as plain_odd.py does.
        pytest.param("pytorch_lightning", "plain_lightning.py", "1", marks=pytest.mark.accuracy),
    ],
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.accuracy)])
def test_a_frameworks_training_is_recorded_as_it_is(
    tmp_path: Path, ranks: int, library: str, name: str, batches: str
) -> None:
    if importlib.util.find_spec(library) is None:  # to import one here takes seconds
        pytest.skip(f"{library} is not installed")
    words = (name, "--steps", "8", "--accumulate", batches)
    training = script(*words) if ranks == 1 else launched(ranks, *words)
    done = do(command("--quiet", "--steps", "4:6", "--out", "run", "--", *training), tmp_path)
    assert done.code == 0, done.err
    assert len(losses(done)) == ranks
    assert steps_by_rank(load(tmp_path / "run")) == {rank: [4, 5] for rank in range(ranks)}
    for rank in range(ranks):
        assert [row["step"] for row in metrics(tmp_path / "run", rank)] == list(range(8))


def test_a_step_of_several_optimizers_is_one_step(tmp_path: Path) -> None:
    training = script("plain_gan.py", "--steps", "9", "--critic-steps", "2")
    done = do(command("--quiet", "--steps", "5:8", "--out", "run", "--", *training), tmp_path, **recorded.of_rank(0, 1))
    assert done.code == 0, done.err
    run = load(tmp_path / "run")
    assert steps_by_rank(run) == {0: [5, 6, 7]}
    names = run.trace(0).ops.filter(run.trace(0).ops["name"].str.starts_with("Optimizer.step#"))
    assert names.group_by("step").len().sort("step").rows() == [(5, 3), (6, 3), (7, 3)]
    assert len(metrics(tmp_path / "run")) == 9


def test_a_step_that_a_scaler_skips_is_counted_and_reported(tmp_path: Path) -> None:
    training = script("plain_scaler.py", "--steps", "14")
    done = do(
        command("--quiet", "--steps", "8:12", "--out", "run", "--", *training), tmp_path, **recorded.of_rank(0, 1)
    )
    assert done.code == 0, done.err
    assert steps_by_rank(load(tmp_path / "run")) == {0: [8, 9, 10, 11]}
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(14))
    assert [row["step"] for row in rows if row.get("skipped")] == [3, 4, 9]
    finite = [row["loss"] for row in rows if not row.get("skipped")]
    assert 0 < min(finite) <= max(finite) < 10  # not what the scaler made of it


# end, exit code, steps profiled, what we say
ENDS = [
    ("raise", 1, (10, 11), "recorded rank 0"),
    ("exit", 7, (10, 11), "recorded rank 0"),
    ("interrupt", -signal.SIGINT, (10, 11), "recorded rank 0"),
    ("kill", -signal.SIGKILL, None, "rank 0 was killed while recording"),
    ("never", 0, None, "nothing was recorded: no torch optimizer took a step"),
    ("short", 0, None, "the training ended after 5 steps, before step 10: nothing was profiled; try --steps 2:5"),
    ("profile", 0, None, "steps 10:15 are not recorded: ProfilerBusyError: another profiler is running"),
    ("profile-late", 0, (10, 11), "the training started a profiler of its own; recorded up to step 11"),
]
# To exit ends a process as an error does; a training without a step as one that ends before its window.
EVERYDAY_ENDS = [end for end in ENDS if end[0] not in ("exit", "never")]


@pytest.mark.parametrize(("end", "code", "steps", "words"), others_in_accuracy(ENDS, EVERYDAY_ENDS))
def test_a_training_ends_as_without_the_recorder_and_one_line_names_the_files(
    tmp_path: Path, end: str, code: int, steps: "tuple[int, ...] | None", words: str
) -> None:
    record = command("record", "--out", "run", "--", *script("plain_single.py", end))
    done = do([sys.executable, "-c", WITHOUT_THE_ANALYSIS, *record[4:]], tmp_path)
    assert done.code == code
    assert sum(words in line for line in done.said) == 1, done.err
    assert "Traceback" not in done.err or end in ("raise", "interrupt")
    if steps:
        assert steps_by_rank(load(tmp_path / "run")) == {0: list(steps)}
    else:
        assert not list(tmp_path.rglob("*.json.gz"))
    if end.startswith("profile"):  # what the training's own profiler saw is all there, and none of ours
        assert f"own profiler: {14 if end == 'profile' else 2} optimizer steps, of tracekit 0" in done.out


_KILLED = re.compile(r"rank 1 was killed while recording(, after at least [1-9]\d* steps)?; complete files remain")


@pytest.mark.accuracy  # test_record_to_url.py kills one of one rank, test_run_being_written.py one of four
def test_a_rank_killed_in_a_window_costs_that_window(tmp_path: Path) -> None:
    training = launched(2, "plain_ddp.py", "--steps", "30", "--kill-at", "12")
    record = command("record", "--steps", "2:4", "--every", "9", "--out", "run", "--", *training)
    done = do([sys.executable, "-c", WITHOUT_THE_ANALYSIS, *record[4:]], tmp_path)
    assert done.code == 1
    assert steps_by_rank(load(tmp_path / "run"))[1] == [2, 3]
    assert sum(_KILLED.search(line) is not None for line in done.said) == 1
    assert "tracekit: recorded ranks 0, 1 in run" in done.said


@pytest.fixture(scope="module")
def single_alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The loss of the training on one rank without the recorder."""
    return losses(do(script("plain_single.py"), tmp_path_factory.mktemp("single")))


WAYS = ("in-backward", "compiled", "closure", "thread")
EVERYDAY_WAYS = ("in-backward", "closure")


@pytest.fixture(scope="module")
def odd_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, list[str]]]:
    """The losses of odd trainings without the recorder, those of every day or the others in one process."""

    @functools.cache
    def train(everyday: bool) -> dict[str, list[str]]:
        ways = [way for way in WAYS if everyday == (way in EVERYDAY_WAYS)]
        done = do(script("plain_odd.py", *ways), tmp_path_factory.mktemp("odd"))
        assert done.code == 0, done.err
        return {way: [line] for way, line in zip(ways, done.out.splitlines(), strict=True)}

    return train


@pytest.mark.parametrize("way", others_in_accuracy(WAYS, EVERYDAY_WAYS))
def test_whatever_way_optimizers_step_steps_are_counted(
    tmp_path: Path, odd_alone: Callable[[bool], dict[str, list[str]]], way: str
) -> None:
    done = do(command("--quiet", "--steps", "4:7", "--out", "run", "--", *script("plain_odd.py", way)), tmp_path)
    assert done.code == 0, done.err
    assert losses(done) == odd_alone(way in EVERYDAY_WAYS)[way] != []
    assert steps_by_rank(load(tmp_path / "run")) == {0: [4, 5, 6]}
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(9))


@pytest.fixture(scope="module")
def with_options(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    """The training on one rank with modules and device metrics, on a machine without a GPU, and its run."""
    folder = tmp_path_factory.mktemp("options")
    words = ("--quiet", "--modules", "--device-metrics", "--out", "run", "--", *script("plain_single.py"))
    return do(command(*words), folder), folder / "run"


def test_the_training_stays_the_same_with_modules_and_device_metrics(
    with_options: tuple[Done, Path], single_alone: list[str]
) -> None:
    done, _ = with_options
    assert done.code == 0, done.err
    assert losses(done) == single_alone != []


def test_modules_are_recorded_on_request(with_options: tuple[Done, Path]) -> None:
    modules = load(with_options[1]).table(ops.modules)
    calls = dict(modules.filter(modules["calls"] > 0).select("module", "calls").iter_rows())
    assert calls == dict.fromkeys(["Sequential", "Sequential.0", "Sequential.1", "Sequential.2"], 5)


def test_device_metrics_on_a_machine_without_a_gpu_are_null(with_options: tuple[Done, Path]) -> None:
    done, run = with_options
    (line,) = done.said
    assert "rank 0: device metrics are not recorded: RuntimeError: this process uses no GPU" in line
    assert {row["sm_clock_mhz"] for row in metrics(run)} == {None}
    assert load(run).table(device_counters.device_counters).is_empty()


def test_a_full_disk_costs_the_trace_and_not_the_training(tmp_path: Path, single_alone: list[str]) -> None:
    """No file may grow beyond 4 KiB: writing a trace fails then, as it does on a full disk."""
    record = command("--quiet", "--out", "run", "--", *script("plain_single.py"))
    limited = ["bash", "-c", 'ulimit -f 4; trap "" XFSZ; exec "$@"', "bash", *record]
    done = do(limited, tmp_path)
    assert done.code == 0, done.err
    assert losses(done) == single_alone != []
    assert len(done.said) == 1
    assert re.search(r"rank 0: steps 10:15 were not written: OSError: .*training continues", done.said[0])
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(20))
    assert not list((tmp_path / "run").glob("*.json*.partial"))


def test_a_run_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = do(command("--out", "file/run", "--", *script("plain_single.py")), tmp_path)
    assert done.code == 0, done.err
    assert len(losses(done)) == 1
    assert len(done.said) == 1
    assert re.search(r"not recorded: OSError: --out \S+/file/run cannot be written .*training continues$", done.said[0])


@pytest.mark.accuracy  # the next name of a folder: test_a_run_of_another_training_is_not_overwritten
def test_trainings_one_after_the_other_have_a_run_each(tmp_path: Path) -> None:
    both = " ".join(["'" + "' '".join(script("plain_single.py")) + "'", "; exec", *script("plain_single.py")])
    done = do(command("--quiet", "--steps", "3:5", "--out", "run", "--", "bash", "-c", both), tmp_path)
    assert done.code == 0, done.err
    for name in ("run", "run-2"):
        assert steps_by_rank(load(tmp_path / name)) == {0: [3, 4]}
    assert len(losses(done)) == 2


def test_two_nodes_with_disks_of_their_own_end_in_one_run(tmp_path: Path) -> None:
    """Each node has its recorder and its scratch disk; only the folder of runs is theirs together."""
    port = str(ports.free_port())
    nodes = []
    for node in (0, 1):
        place = tmp_path / f"node{node}"
        (place / "scratch").mkdir(parents=True)
        options = ["--steps", "4:7", "--out", str(tmp_path / "shared" / "run"), "--scratch", str(place / "scratch")]
        training = command(*options, "--", *script("plain_ddp.py", "--steps", "9"))
        nodes.append(start(training, place, **recorded.of_rank(node, 2, LOCAL_RANK="0", MASTER_PORT=port)))
    first, second = [finish(node) for node in nodes]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["run"]
    assert steps_by_rank(load(tmp_path / "shared" / "run")) == {0: [4, 5, 6], 1: [4, 5, 6]}
    assert "\ntime  " in first.err
    assert second.said == ["tracekit: recorded rank 1 in " + str(tmp_path / "shared" / "run")]
    for node in (0, 1):
        assert not list((tmp_path / f"node{node}" / "scratch").iterdir())


def test_windows_can_be_requested_while_a_training_runs(tmp_path: Path) -> None:
    """By a signal to the launcher, then by --attach; both name steps still to come, so ranks need not wait."""
    options = ["--quiet", "--steps", "none", "--signal", "USR2", "--out", "run"]
    training = start(command(*options, "--", *script("plain_single.py", "long")), tmp_path, SECONDS_AT_MOST="500")
    run = tmp_path / "run"
    recorded.wait_until(lambda: (run / "rank00000.metrics.jsonl.partial").exists())
    training.send_signal(signal.SIGUSR2)
    recorded.wait_until(lambda: (run / "rank00000.pt.trace.json.gz").exists())
    attached = do(command("--quiet", "--attach", "run", "--steps", "3"), tmp_path)
    assert attached.code == 0, attached.err
    training.send_signal(signal.SIGINT)
    done = finish(training)
    assert done.code == -signal.SIGINT
    found = load(run)
    windows = [found.trace(0, window).steps["step"].to_list() for window in (0, 1)]
    assert [len(steps) for steps in windows] == [5, 3]
    assert [steps[0] for steps in windows] == [window["first_step"] for window in found.manifest["windows"]]
    assert windows[0][-1] < windows[1][0]
    late = do(command("--attach", "run"), tmp_path)
    assert (late.code, late.said) == (
        2,
        ["tracekit: run: no training is being recorded there; start one with tracekit record"],
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--", "no-such-command"], 127, "no-such-command: command not found"),
        (["--steps", "15:10", "--", "true"], 2, "--steps: '15:10' is empty"),
        (["--steps", "ten", "--", "true"], 2, "--steps: 'ten' is not a range of steps"),
        (["--every", "3", "--", "true"], 2, "--steps: a window every 3 steps is too often for windows of 5 steps"),
        (["--ranks", "first", "--", "true"], 2, "argument --ranks: 'first' names no ranks"),
        (["--disk-budget", "much", "--", "true"], 2, "argument --disk-budget: 'much' is not a size"),
        (["--signal", "KILL", "--", "true"], 2, "argument --signal: 'KILL' cannot be used"),
        (["--out", "run"], 2, "no command to record"),
        (["--out", sys.executable, "--", "true"], 2, "is a file; name a folder for the run"),
        (["--attach", "run", "--steps", "4:5"], 2, "--attach takes --steps N"),
        (["--", "bash", "-c", "exit 5"], 5, "nothing was recorded: the command ended with exit code 5"),
        (
            ["--", "bash", "-c", "kill -TERM $$"],
            -signal.SIGTERM,
            "nothing was recorded: the command was ended by SIGTERM",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_exit_code_is_the_commands_own_or_says_what_is_wrong(
    tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    done = do([sys.executable, "-m", "tracekit.capture", "record", *words], tmp_path)
    assert done.code == code
    assert len(done.said) == 1
    assert said in done.said[0]


def test_signals_reach_the_training_once(tmp_path: Path) -> None:
    count = "import signal, time; seen = []; signal.signal(signal.SIGTERM, lambda *_: seen.append(1)); "
    count += "print('ready', flush=True)\nwhile not seen: time.sleep(0.01)\ntime.sleep(0.5); print(len(seen))"
    process = start(command("--quiet", "--", sys.executable, "-c", count), tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert (done.code, done.out.split()) == (0, ["1"])


def test_a_sitecustomize_of_the_users_own_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'")
    program = [sys.executable, "-c", "import os, sitecustomize; print(os.environ.get('SEEN'), sitecustomize.__file__)"]
    path = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
    done = do(command("--quiet", "--", *program), tmp_path, PYTHONPATH=path)
    assert done.out.split() == ["yes", str(tmp_path / "sitecustomize.py")]


def test_a_run_of_another_training_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    done = do(command("--quiet", "--steps", "3:5", "--out", "run", "--", *script("plain_single.py")), tmp_path)
    assert done.code == 0, done.err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]
    assert steps_by_rank(load(tmp_path / "run-2")) == {0: [3, 4]}


def test_the_training_dies_with_its_launcher(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    process = start(command("--quiet", "--", *program), tmp_path)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    recorded.wait_until(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
