"""Memory snapshots that were compressed with gzip or zstd are read as they are."""

import gzip
import pickle

import pyarrow as pa
import pytest

from tests.support.cli_runner import ROOT, tracekit
from tracekit.errors import BadTraceError
from tracekit.ingest.readers import memory_snapshots

LEAK = ROOT / "tests" / "recordings" / "out_of_memory" / "leak"
PACKED = LEAK / "rank00000.memory.pickle.gz"
TABLES = ("segments", "blocks", "events", "stacks", "frames", "annotations")


def zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize(("pack", "ending"), [(gzip.compress, ".gz"), (zstd, ".zst")])
def test_its_tables_are_those_of_the_plain_file(tmp_path, pack, ending):
    plain = tmp_path / "plain.pickle"
    plain.write_bytes(gzip.decompress(PACKED.read_bytes()))
    packed = tmp_path / f"packed.pickle{ending}"
    packed.write_bytes(pack(plain.read_bytes()))
    expected, found = memory_snapshots.read(plain), memory_snapshots.read(packed)
    assert expected.events.height > 1000
    for name in TABLES:
        assert getattr(found, name).equals(getattr(expected, name)), name


@pytest.mark.parametrize("path", [PACKED, LEAK], ids=["file", "folder with another JSON file"])
def test_the_command_says_why_it_ran_out_of_memory(path):
    done = tracekit("memory", path)
    assert done.returncode == 0, done.stderr
    assert "Out of memory: memory grows by 16 MiB a step, which aten::clone" in " ".join(done.stdout.split())


def test_a_truncated_or_damaged_one_is_refused_in_a_line(tmp_path):
    content = PACKED.read_bytes()
    path = tmp_path / "cut.pickle.gz"
    for broken in (content[: len(content) // 2], content[:2000] + b"\xff" * 64 + content[2064:]):
        path.write_bytes(broken)
        done = tracekit("memory", path)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


def test_a_decompression_bomb_is_refused(tmp_path):
    path = tmp_path / "bomb.pickle.gz"
    path.write_bytes(gzip.compress(b"\x80\x04](" + pickle.dumps("x" * 64)[2:-1] * 4_000_000))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(BadTraceError, match="far more bytes"):
        memory_snapshots.read(path)
