"""What a training needs beside torch: nothing, or one line that names the extra."""

from pathlib import Path

import pytest

from tests.integration.launched import MICRO, train
from tests.support.python_path import REPOSITORY

HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {"numpy", "tokenizers", "datasets", "safetensors", "transformers", "tensorboard", "wandb", "pyarrow", "polars"}

class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Visible
"""


@pytest.fixture
def torch_only(tmp_path: Path) -> tuple[str, ...]:
    """Return the beginning of a command whose Python and its children see no package that is optional."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    return ("env", f"PYTHONPATH={tmp_path}:{REPOSITORY}")


def test_streamed_json_lines_are_trained_and_evaluated_on(torch_only: tuple[str, ...], tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a line of text that repeats itself"}\n' * 100)
    options = ["--data", str(text), "--stream", "--eval-every", "2", "--eval-split", "0.1", "--optimizer", "lion"]
    code, out, err = train(
        "--strategy", "yafsdp", "--out", str(tmp_path / "run"), "--steps", "4", *MICRO, *options, prefix=torch_only
    )
    assert code == 0, err
    assert "evaluation after step 3" in out


def test_a_missing_package_is_one_line_that_names_its_extra(torch_only: tuple[str, ...], tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "run"), *MICRO, "--train-tokenizer", "300"]
    code, _, err = train("--strategy", "ddp", *options, prefix=torch_only)
    assert code == 2
    assert err.splitlines()[-1].endswith("a tokenizer needs `tokenizers`: pip install 'torch-tracekit[tokenizers]'")
    assert "Traceback" not in err
