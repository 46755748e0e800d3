"""The same run, written in another way, gets the same answers: another order, other numbers, another program."""

import functools
import random
from pathlib import Path

import pytest

from tests.fuzz import equivalents

RECORDINGS = Path(__file__).parents[1] / "recordings"
PUBLIC = Path(__file__).parents[3] / "shared" / "traces"
RUNS = {
    # NCCL tensor parallel, from this project
    "dtensor_tp": sorted(RECORDINGS.glob("dtensor_tp/*.json.gz")),
    # clocks of whole µs: many operators have equal times
    "hta_pair_of_128": sorted(PUBLIC.glob("hta_pair_of_128/*.json.gz")),
    "torchrec_v100_4ranks": sorted(PUBLIC.glob("torchrec_v100_4ranks/*.json.gz"))[:2],
    # streams ordered by CUDA events
    "hta_event_sync": sorted(PUBLIC.glob("hta_event_sync/*.json.gz")),
}


def in_the_other_ways(trace, drawn):
    """A trace with all changes but `shuffled`, which would hide that it is written backwards; bytes come last."""
    others = [change for change in equivalents.CHANGES if change is not equivalents.shuffled]
    return functools.reduce(lambda changed, change: change(changed, drawn), others, trace)


@pytest.mark.parametrize(
    ("run", "changes"),
    [
        ("dtensor_tp", (equivalents.shuffled, in_the_other_ways)),
        *(pytest.param(run, equivalents.CHANGES, marks=pytest.mark.accuracy, id=run) for run in RUNS),
    ],
)
def test_a_run_written_in_another_way_gets_the_same_answers(tmp_path, run, changes):
    if not RUNS[run]:
        pytest.skip("the public traces are not here")
    files = {path.name.removesuffix(".gz"): equivalents.read(path) for path in RUNS[run]}
    expected = equivalents.answers(files, tmp_path / "original" / run)
    for change in changes:
        drawn = random.Random(26)
        changed = {name: change(trace, drawn) for name, trace in files.items()}
        said = equivalents.answers(changed, tmp_path / change.__name__ / run)
        for command, answer in expected.items():
            assert said[command] == answer, (change.__name__, command)
