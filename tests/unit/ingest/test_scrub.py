"""A scrubbed run contains no host, user or path, and all its numbers are unchanged."""

import gzip
import json
from pathlib import Path

import pytest

from tracekit.errors import BadTraceError, InputError
from tracekit.ingest.scrub import scrub

MANIFEST = {
    "schema": "tracekit.run/1",
    "host": "gpu-node17.cluster.example.com",
    "command": ["/home/alice/llm/train.py", "--out", "/scratch/alice/runs/q3", "--master-addr", "lead-node"],
    "arguments": {"data": ["/home/alice/books/a.txt"], "batch": 4, "wandb_api_key": "abc123"},
    "versions": {"torch": "2.13.0", "nccl": "2.21.5.1"},
    "world_size": 2,
}


def event(number: int, name: str, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": 100.25 + number, "dur": 1.5} | (
        {"args": args} if args else {}
    )


EVENTS = [
    event(0, "/home/alice/llm/model.py(12): forward", stack="/opt/x/site-packages/torch/nn/modules/linear.py(3): f"),
    event(1, "aten::mm"),
    event(2, "Torch-Compiled Region: 0/0", note="alice@example.com via tcp://gpu-node17:29500 and 10.1.2.3"),
    event(3, "a / b", kernel_file="/tmp/torchinductor_alice/ab/cab.py", where="C:\\Users\\bob\\work\\run.py"),
]


def write_run(folder: Path, *, indent: int | None = 2) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(MANIFEST, indent=2))
    trace = {"schemaVersion": 1, "traceEvents": EVENTS, "traceName": "/scratch/alice/runs/q3/rank0.pt.trace.json"}
    packed = gzip.compress(json.dumps(trace, indent=indent).encode())
    (folder / "rank00000.pt.trace.json.gz").write_bytes(packed)
    line = {"checkpoint": "step-2", "stage": "write", "dur_ns": 12, "path": "/scratch/alice/runs/q3/checkpoints"}
    (folder / "rank00000.checkpoint.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def texts(out: Path) -> dict[str, str]:
    read = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    return {
        str(path.relative_to(out)): (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
        for path, raw in read.items()
    }


def numbers(value: object) -> list[object]:
    if isinstance(value, dict):
        return [number for key in value for number in numbers(value[key])]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("indent", [2, None], ids=["pretty", "on one line"])
def test_no_user_host_or_path_is_left(tmp_path: Path, indent: int | None) -> None:
    scrub(write_run(tmp_path / "run", indent=indent), tmp_path / "out")

    copied = "".join(texts(tmp_path / "out").values())
    for secret in ("alice", "bob", "node17", "lead-node", "example.com", "scratch", "/home", "10.1.2.3", "abc123"):
        assert secret not in copied


def test_names_that_analysis_needs_stay(tmp_path: Path) -> None:
    scrub(write_run(tmp_path / "run"), tmp_path / "out")

    trace = json.loads(texts(tmp_path / "out")["rank00000.pt.trace.json.gz"])
    names = [each["name"] for each in trace["traceEvents"]]
    assert names[1:] == ["aten::mm", "Torch-Compiled Region: 0/0", "a / b"]
    assert names[0].endswith("/model.py(12): forward")
    assert trace["traceEvents"][0]["args"]["stack"].endswith("/site-packages/torch/nn/modules/linear.py(3): f")
    assert numbers(trace) == numbers({"schemaVersion": 1, "traceEvents": EVENTS})
    manifest = json.loads(texts(tmp_path / "out")["run.json"])
    assert manifest["versions"] == MANIFEST["versions"]
    assert manifest["arguments"]["batch"] == 4


def test_a_value_has_the_same_placeholder_in_all_files(tmp_path: Path) -> None:
    scrub(write_run(tmp_path / "run"), tmp_path / "out")

    copied = texts(tmp_path / "out")
    trace = json.loads(copied["rank00000.pt.trace.json.gz"])
    log = json.loads(copied["rank00000.checkpoint.jsonl"])
    command = json.loads(copied["run.json"])["command"]
    assert trace["traceEvents"][0]["name"].startswith(command[0].removesuffix("train.py"))
    assert log["path"].startswith("<path")
    assert log["path"] != command[2]


def test_the_command_lists_what_it_removed_and_what_it_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "rank00000.memory.pickle").write_bytes(b"\x80\x04cos\nsystem\n.")
    (run / "checkpoints").mkdir()
    (run / "settings.json").write_text('{"lr": 1}')

    done = scrub(run, tmp_path / "out")

    assert {name for name, _ in done.left_out} == {"rank00000.memory.pickle", "checkpoints", "settings.json"}
    assert set(texts(tmp_path / "out")) == set(done.files)
    assert done.removed["secret"] == (1, 1)
    assert done.removed["email"] == (1, 1)
    assert done.removed["address"] == (1, 1)
    assert done.removed["host"][0] == 2


def test_words_named_by_the_caller_are_removed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "rank00000.metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "note": "project Bluebird"}\n')

    scrub(run, tmp_path / "out", words=["Bluebird"])

    assert texts(tmp_path / "out")["rank00000.metrics.jsonl"] == '{"step": 1, "loss": 2.5, "note": "project <user1>"}\n'


def test_a_host_in_a_file_name_is_removed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    trace = json.dumps({"traceEvents": EVENTS})
    (tmp_path / "run" / "build-box_4242.1700000000.pt.trace.json").write_text(trace)

    scrub(tmp_path / "run", tmp_path / "out")

    assert list(texts(tmp_path / "out")) == ["host1_4242.1700000000.pt.trace.json"]


def test_gzip_headers_name_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with gzip.open(tmp_path / "run" / "build-box_4242.1700000000.pt.trace.json.gz", "wb") as file:
        file.write(json.dumps({"traceEvents": EVENTS}).encode())

    scrub(tmp_path / "run", tmp_path / "out")

    raw = next((tmp_path / "out").iterdir()).read_bytes()
    assert b"build-box" not in raw
    assert raw[3] == 0  # no flags: neither a name nor a comment


def test_a_user_with_non_ascii_letters_is_removed_in_both_spellings(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    escaped = '{"traceEvents": [{"ph": "X", "name": "/home/\\u00e9mile/x.py", "ts": 1}], "note": "by \\u00e9mile"}'
    (tmp_path / "run" / "rank0.json").write_text(escaped)
    (tmp_path / "run" / "rank1.json").write_text('{"traceEvents": [{"ph": "X", "name": "for émile", "ts": 1}]}')

    scrub(tmp_path / "run", tmp_path / "out")

    copied = texts(tmp_path / "out")
    assert "mile" not in copied["rank0.json"]
    assert "mile" not in copied["rank1.json"]


@pytest.mark.parametrize(
    ("key", "written", "word"),
    [
        ("user", r"jos\u00e9p", r"jos\u00e9p"),
        ("user", r"jos\u00e9p", "josép"),
        ("user", r"CORP\\alice7", "alice7"),
        ("host", r"\u00e9node7", r"\u00e9node7"),
        ("user", r"\udcffal", r"\udcffal"),
    ],
)
def test_names_that_are_written_with_escapes_are_removed(tmp_path: Path, key: str, written: str, word: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(f'{{"{key}": "{written}", "note": "for {word} only"}}', encoding="utf-8")
    scrub(tmp_path / "run", tmp_path / "out")
    left = (tmp_path / "out" / "run.json").read_text(encoding="utf-8")
    assert word not in left
    assert written not in left


def test_one_trace_file_becomes_one_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")

    scrub(run / "rank00000.pt.trace.json.gz", tmp_path / "clean.json.gz")

    assert b"alice" not in gzip.decompress((tmp_path / "clean.json.gz").read_bytes())


def test_an_existing_output_is_not_overwritten(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    out = tmp_path / "out"
    scrub(run, out)
    before = texts(out)
    with pytest.raises(InputError, match="--force"):
        scrub(run, out)
    scrub(run, out, force=True)
    assert texts(out) == before
    (out / "thesis.docx").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.docx"):
        scrub(run, out, force=True)
    assert (out / "thesis.docx").exists()


@pytest.mark.parametrize("out", ["run", "run/inside", "."])
def test_a_run_is_not_scrubbed_into_itself(tmp_path: Path, out: str) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(InputError, match="name another path"):
        scrub(run, tmp_path / out, force=True)


def test_a_truncated_file_leaves_no_copy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = run / "rank00000.pt.trace.json.gz"
    path.write_bytes(path.read_bytes()[:-30])

    with pytest.raises(BadTraceError, match="rank00000"):
        scrub(run, tmp_path / "out")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
