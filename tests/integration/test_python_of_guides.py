"""The Python that guides show runs as it is, on a sample run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def _paths_of_guides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "today").symlink_to(ROOT / "sample_traces" / "demo-fsdp2")
    (tmp_path / "sample_traces").symlink_to(ROOT / "sample_traces")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_paths_of_guides")
@pytest.mark.parametrize(
    ("page", "printed"), [("query.md", "COMM001 "), ("critical_path.md", "shape: (5, "), ("notebook.md", "")]
)
def test_the_python_of_a_guide_runs_as_it_is(page: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = _BLOCKS.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    assert capsys.readouterr().out.startswith(printed)
