import sys
import zipfile
from pathlib import Path

import pytest

from tracekit.model import plugins


def install(place: Path, name: str, entry_points: str | None) -> None:
    folder = place / f"{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if entry_points is not None:
        (folder / "entry_points.txt").write_text(entry_points)


def test_entry_points_of_a_group_come_from_all_places_of_the_import_path(tmp_path, monkeypatch):
    install(tmp_path / "a", "one", "[console_scripts]\none = one:main\n\n[tracekit.rules]\nslow = one:Slow\n")
    install(tmp_path / "b", "two", "[tracekit.rules]\nslower = two:Slower\n[tracekit.readers]\nlog = two:Logs\n")
    install(tmp_path / "b", "three", None)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "absent"), str(tmp_path / "a"), str(tmp_path / "b")])
    assert [point.value for point in plugins.entry_points("tracekit.rules")] == ["one:Slow", "two:Slower"]
    assert [point.value for point in plugins.entry_points("tracekit.readers")] == ["two:Logs"]
    assert not plugins.entry_points("tracekit.metrics")


def test_a_plugin_in_the_current_folder_and_one_in_an_archive_are_found(tmp_path, monkeypatch):
    install(tmp_path, "here", " [tracekit.rules]\nslow = here:Slow\n")
    with zipfile.ZipFile(tmp_path / "modules.zip", "w") as archive:
        archive.writestr("packed-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: packed\nVersion: 1.0\n")
        archive.writestr("packed-1.0.dist-info/entry_points.txt", "[tracekit.readers]\nlog = packed:Logs\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [""])
    assert [point.value for point in plugins.entry_points("tracekit.rules")] == ["here:Slow"]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "modules.zip")])
    assert [point.value for point in plugins.entry_points("tracekit.readers")] == ["packed:Logs"]


def test_no_entry_points_are_parsed_if_no_distribution_has_a_group_of_ours(tmp_path, monkeypatch):
    install(tmp_path, "other", "[console_scripts]\ntracekit.rules = other:main\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda: pytest.fail("parsed"))
    assert not plugins.entry_points("tracekit.rules")
