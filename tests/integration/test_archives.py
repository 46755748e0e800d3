"""A run in an archive is the run that its folder is; damaged and hostile archives are read as far as is safe."""

import io
import os
import pickle
import shutil
import stat
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

import tracekit
from tests.support.cli_runner import ROOT
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import archives, budget

RUN = ROOT / "sample_traces" / "faults" / "healthy-fsdp2"
NAMES = sorted(file.name for file in RUN.iterdir())


def tar_of(run, path, mode="w", prefix="job/run"):
    with tarfile.open(path, mode) as archive:
        archive.add(run, prefix)
    return path


def zip_of(run, path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(run.iterdir()):
            archive.write(file, f"run/{file.name}")
    return path


def zstd_of(run, path):
    plain = tar_of(run, path.with_suffix(".plain"))
    path.write_bytes(pa.compress(plain.read_bytes(), codec="zstd", asbytes=True))
    plain.unlink()
    return path


ARCHIVES = {
    "run.tar": tar_of,
    "run.tar.gz": lambda run, path: tar_of(run, path, "w:gz"),
    "run.tgz": lambda run, path: tar_of(run, path, "w:gz"),
    "run.tar.zst": zstd_of,
    "run.zip": zip_of,
    "a_tar_called.json": tar_of,
    "a_tar_called.json.gz": lambda run, path: tar_of(run, path, "w:gz"),
    "a_zip_called.json": zip_of,
}


def tables(run):
    return {(t.rank, t.window, name): table for t in run.traces() for name, table in t.tables.items()}


def own_tables(path):
    return tables(tracekit.load(path, cache=False))


@pytest.fixture(scope="module")
def of_folder():
    return own_tables(RUN)


def member(name, content=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, io.BytesIO(content)


def tar_with(path, *members):
    with tarfile.open(path, "w") as archive:
        for info, content in members:
            archive.addfile(info, content)
    return path


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_read_as_its_folder(tmp_path, of_folder, name):
    path = ARCHIVES[name](RUN, tmp_path / name)
    run = tracekit.load(path, cache=False)
    assert run.path == str(path)
    assert run.manifest["strategy"] == "fsdp2"
    assert all(source.path.startswith(f"{path}/") and Path(source.path).name in NAMES for source in run.sources)
    read = tables(run)
    assert read.keys() == of_folder.keys()
    assert all(read[key].equals(of_folder[key]) for key in read)
    assert [t.path for t in run.traces()] == [s.path for s in run.sources]


@pytest.mark.parametrize("with_manifest", [{0}, {0, 1}], ids=["manifest of rank 0", "manifest of each rank"])
def test_archives_of_single_ranks_in_a_folder_are_one_run(tmp_path, of_folder, with_manifest):
    for rank in range(2):
        with tarfile.open(tmp_path / f"rank{rank}.tar.gz", "w:gz") as archive:
            if rank in with_manifest:
                archive.add(RUN / "run.json", "run.json")
            for name in NAMES:
                if name.startswith(f"rank0000{rank}"):
                    archive.add(RUN / name, name)
    run = tracekit.load(tmp_path, cache=False)
    assert list(run.ranks) == [0, 1]
    assert run.manifest["strategy"] == "fsdp2"
    assert all(table.equals(of_folder[key]) for key, table in tables(run).items())


def test_archives_next_to_traces_are_not_opened(tmp_path):
    shutil.copytree(RUN, tmp_path / "run")
    tar_of(RUN, tmp_path / "run" / "backup.tar")
    assert len(tracekit.load(tmp_path / "run", cache=False).sources) == len(tracekit.load(RUN, cache=False).sources)


def test_a_truncated_archive_is_read_up_to_the_cut(tmp_path):
    whole = tar_of(RUN, tmp_path / "run.tar.gz", "w:gz").read_bytes()
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(whole[: len(whole) * 9 // 10])
    run = tracekit.load(cut, cache=False)
    issues = run.data_quality.filter(kind="damaged_archive")
    assert set(issues["path"]) == {str(cut)}
    assert any("ends early" in message for message in issues["message"])
    assert any("is damaged" in message for message in issues["message"])
    assert run.trace(0).activities.height > 1000


def test_a_damaged_zip_is_refused_in_one_line(tmp_path):
    path = zip_of(RUN, tmp_path / "run.zip")
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(BadTraceError, match=r"run\.zip: the zip archive is damaged or truncated"):
        tracekit.load(path)


def test_an_encrypted_member_is_said(tmp_path):
    path = zip_of(RUN, tmp_path / "run.zip")
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at + 8] |= 1  # the flag of encryption in the directory, and in the member's header
    content[content.index(b"PK\x03\x04") + 6] |= 1
    path.write_bytes(content)
    issues = tracekit.load(path, cache=False).data_quality.filter(kind="damaged_archive")
    assert any("encrypted" in message for message in issues["message"])


def test_an_archive_without_traces_is_said(tmp_path):
    path = tar_with(tmp_path / "docs.tar", member("readme.md", b"nothing"))
    with pytest.raises(InputError, match=r"docs\.tar: no trace files .* in this archive"):
        tracekit.load(path)


def test_the_cache_serves_an_archive_that_did_not_change(tmp_path, monkeypatch):
    path = tar_of(RUN, tmp_path / "run.tar.gz", "w:gz")
    first = tables(tracekit.load(path))
    archives._unpack_version.cache_clear()
    run = tracekit.load(path)
    monkeypatch.setattr("tracekit.ingest.files.ArchivedTrace.local", lambda self: pytest.fail("read again"))
    assert all(table.equals(first[key]) for key, table in tables(run).items())


def test_the_unpacked_folder_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    tracekit.load(tar_of(RUN, tmp_path / "run.tar"), cache=False)
    assert list((tmp_path / "temporary").iterdir())
    archives._unpack_version.cache_clear()
    assert not list((tmp_path / "temporary").iterdir())


def test_a_source_of_an_archive_can_be_read_by_another_process(tmp_path):
    run = tracekit.load(tar_of(RUN, tmp_path / "run.tar"), cache=False)
    copy = pickle.loads(pickle.dumps(run.sources[0].origin))
    assert copy.sha256() == run.sources[0].origin.sha256()
    shutil.rmtree(copy.archive.folder)
    with pytest.raises(BadTraceError, match="not on this machine"):
        copy.sha256()


# Hostile archives ----------------------------------------------------------------------------------------------------

TRACE = (RUN / "rank00000.pt.trace.json.gz").read_bytes()
ESCAPES = ("../out.json.gz", "/tmp/tracekit-out.json.gz", "a/../../out.json.gz", "a/" + "b" * 300 + ".json.gz")


@pytest.mark.parametrize("name", ESCAPES)
def test_a_member_that_leads_out_of_the_archive_is_left_out(tmp_path, name):
    path = tar_with(tmp_path / "run.tar", member(name, TRACE), member("rank0.pt.trace.json.gz", TRACE))
    run = tracekit.load(path, cache=False)
    assert [Path(s.path).name for s in run.sources] == ["rank0.pt.trace.json.gz"]
    issues = run.data_quality.filter(kind="damaged_archive")
    reasons = ("leads out of the archive", "too long for a disk")
    assert any(reason in message for message in issues["message"] for reason in reasons)
    assert not Path("/tmp/tracekit-out.json.gz").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.tar"]


def test_links_and_devices_are_not_made(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    path = tar_with(
        tmp_path / "run.tar",
        member("link.json", type=tarfile.SYMTYPE, linkname=str(secret)),
        member("hard.json", type=tarfile.LNKTYPE, linkname="rank0.pt.trace.json.gz"),
        member("pipe.json", type=tarfile.FIFOTYPE),
        member("folder", type=tarfile.SYMTYPE, linkname="/tmp"),
        member("folder/below.json.gz", TRACE),
        member("rank0.pt.trace.json.gz", TRACE),
    )
    folder = archives.unpack(path, lambda name: ".json" in name).folder
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*")) == [
        "folder",
        "folder/below.json.gz",
        "rank0.pt.trace.json.gz",
    ]
    assert all(stat.S_ISREG(p.lstat().st_mode) or stat.S_ISDIR(p.lstat().st_mode) for p in folder.rglob("*"))


def test_a_symbolic_link_in_a_zip_is_not_made(tmp_path):
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        link = zipfile.ZipInfo("link.json")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("rank0.pt.trace.json.gz", TRACE)
    folder = archives.unpack(tmp_path / "run.zip", lambda name: ".json" in name).folder
    assert [p.name for p in folder.rglob("*")] == ["rank0.pt.trace.json.gz"]


def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "LEAST_BYTES", 1 << 20)
    bomb = tmp_path / "bomb.tar.gz"
    with tarfile.open(bomb, "w:gz") as archive:
        info, _ = member("rank0.json")
        info.size = 64 << 20
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    before = set(Path(tempfile.gettempdir()).glob("tracekit-archive-*"))
    with pytest.raises(BadTraceError, match=r"bomb\.tar\.gz: unpacks to far more bytes"):
        tracekit.load(bomb)
    assert set(Path(tempfile.gettempdir()).glob("tracekit-archive-*")) <= before


def test_a_huge_extended_header_is_not_read_to_memory(tmp_path):
    path = tmp_path / "run.tar"
    with tarfile.open(path, "w") as archive:
        info, _ = member("@LongLink", type=tarfile.GNUTYPE_LONGNAME)
        info.size = 1 << 40
        archive.fileobj.write(info.tobuf(tarfile.GNU_FORMAT))
    path.write_bytes(path.read_bytes() + bytes(4096))
    with pytest.raises(BadTraceError, match="an extended header of 1,099,511,627,776 bytes"):
        tracekit.load(path)


def test_a_member_whose_header_states_more_than_there_is_ends_the_archive_at_once(tmp_path):
    with tarfile.open(tmp_path / "run.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(RUN, "run")
        member = tarfile.TarInfo("run/notes")
        member.pax_headers = {"size": "9" * 30}
        archive.addfile(member)
    run = tracekit.load(tmp_path / "run.tar", cache=False)
    assert run.ranks == tracekit.load(RUN).ranks
    assert "ends early" in " ".join(run.data_quality["message"])


def test_a_later_member_replaces_an_earlier_one_of_its_name(tmp_path):
    path = tar_with(tmp_path / "run.tar", member("rank0.json.gz", b"old"), member("rank0.json.gz", TRACE))
    assert tracekit.load(path, cache=False).trace(0).activities.height > 0


def test_a_name_that_is_a_folder_and_a_file_is_said(tmp_path):
    path = tar_with(
        tmp_path / "run.tar",
        member("a.json.gz", TRACE),
        member("a.json.gz/b.json.gz", TRACE),
        member("rank0.json.gz", TRACE),
    )
    issues = tracekit.load(path, cache=False).data_quality.filter(kind="damaged_archive")
    assert any("name of a folder or a file of another member" in message for message in issues["message"])


def test_too_many_members_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "_MAX_MEMBERS", 10)
    path = tar_with(tmp_path / "run.tar", *(member(f"{n}.txt") for n in range(11)))
    with pytest.raises(BadTraceError, match="more than 10 files"):
        tracekit.load(path)


def test_a_pipe_is_no_archive(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    assert not archives.is_archive(tmp_path / "pipe.tar")
