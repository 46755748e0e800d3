"""Exposed copies: what names of copies say of the host's memory."""

import pytest

from tests.support import kineto_files
from tracekit.analysis.compute import exposed_copies
from tracekit.ingest import loader


def memory_of(tmp_path, *names):
    """Return the kinds of host memory of copies with these names, one after the other, without any other work."""
    trace = kineto_files.trace(0, 1, steps=1)
    trace["traceEvents"] = [
        {"ph": "X", "cat": "gpu_memcpy", "name": name, "pid": 0, "tid": 7, "ts": 10 * number, "dur": 5,
         "args": {"device": 0, "stream": 7}}
        for number, name in enumerate(names)
    ]  # fmt: skip
    path = kineto_files.write(tmp_path / "rank0.json", trace)
    (read,) = loader.load(str(path), cache=None).traces()
    return exposed_copies.exposed_copies(read)["memory"].to_list()


@pytest.mark.parametrize(
    ("names", "memory"),
    [
        (
            ["Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)"],
            [exposed_copies.PAGEABLE, exposed_copies.PINNED],
        ),
        (["CopyHostToDevice", "CopyDeviceToHost"], [None, None]),  # AMD
        (["Memcpy HtoD (Managed -> Device)"], [None]),
        (["CopyHostToDevice", "Memcpy HtoD (Pinned -> Device)"], [None, exposed_copies.PINNED]),
    ],
)
def test_the_memory_of_the_host_is_null_where_the_name_has_none(tmp_path, names, memory):
    assert memory_of(tmp_path, *names) == memory
