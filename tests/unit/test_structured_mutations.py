"""Changes within the structure of binary files: the files can be read, and the same seed makes the same file."""

import pickle
import pickletools
import random
import sqlite3

import pytest

from tests.fuzz import inputs, structures

perfetto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
SEEDS = range(60)
DOCUMENT = {"segments": [{"address": 1 << 40, "stream": 0, "frames": ["a", 2.5, None, (True, b"x")]}], "big": 1 << 90}


def database() -> bytes:
    made = sqlite3.connect(":memory:")
    made.executescript(
        "CREATE TABLE kernels (id INTEGER, start INTEGER, name TEXT); CREATE TABLE empty (value);"
        "INSERT INTO kernels VALUES (1, 10, 'gemm'), (2, 20, 'copy'), (3, 30, NULL)"
    )
    return made.serialize()


def rows(data: bytes) -> list[tuple]:
    read = sqlite3.connect(":memory:")
    read.deserialize(data)
    tables = [name for (name,) in read.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    return [(name, *row) for name in tables for row in read.execute(f"SELECT * FROM {name}")]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_fields_of_a_message_are_written_as_they_were_read(which: int) -> None:
    data = inputs._perfetto_files()[which]
    fields = structures._parsed(data)
    assert fields
    assert b"".join(map(structures.encoded, fields)) == data


def test_a_message_with_a_changed_field_is_still_a_message() -> None:
    data = inputs._perfetto_files()[1]
    whole = perfetto.Trace.FromString(data)
    changed = [structures.protobuf(data, random.Random(seed)) for seed in SEEDS]
    assert len(set(changed)) > len(SEEDS) // 2
    read = [fields for made in changed if (fields := structures._parsed(made))]
    assert len(read) == len(SEEDS)
    packets = [sum(number == 1 for number, _, _ in fields) for fields in read]
    assert any(count != len(whole.packet) for count in packets)
    assert sum(count == len(whole.packet) for count in packets) > len(SEEDS) // 2


def test_a_database_with_a_changed_cell_is_still_a_database() -> None:
    data = database()
    changed = [structures.sqlite(data, random.Random(seed)) for seed in SEEDS]
    read = [rows(made) for made in changed]
    assert sum(found != rows(data) for found in read) > len(SEEDS) // 2
    assert any(len(found) < 3 for found in read)
    assert any(len(found) > 3 for found in read)


def test_a_database_without_tables_stays_as_it_is() -> None:
    made = sqlite3.connect(":memory:")
    made.executescript("CREATE TABLE t (a); DROP TABLE t")
    empty = made.serialize()
    assert structures.sqlite(empty, random.Random(1)) == empty


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_changes_by_opcodes(protocol: int) -> None:
    data = pickle.dumps(DOCUMENT, protocol)
    known = {data[begin:end] for begin, end in _opcodes(data)} | set(structures._OPCODES)
    for seed in SEEDS:
        changed = structures.pickled(data, random.Random(seed))
        try:
            edges = _opcodes(changed)
        except ValueError:
            continue  # no opcode ends it, or an argument lost its end
        assert {changed[begin:end] for begin, end in edges[:-1]} <= known


def test_bytes_that_are_no_pickle_are_changed_as_bytes() -> None:
    assert len({structures.pickled(b"no pickle", random.Random(seed)) for seed in SEEDS}) > len(SEEDS) // 2


@pytest.mark.parametrize("change", [structures.protobuf, structures.sqlite, structures.pickled])
def test_the_same_seed_makes_the_same_file(change) -> None:
    data = {structures.protobuf: inputs._perfetto_files()[0], structures.sqlite: database()}.get(
        change, pickle.dumps(DOCUMENT)
    )
    assert change(data, random.Random(5)) == change(data, random.Random(5))


def _opcodes(data: bytes) -> list[tuple[int, int]]:
    places = [place for _, _, place in pickletools.genops(data) if place is not None]
    return list(zip(places, [*places[1:], len(data)], strict=True))
