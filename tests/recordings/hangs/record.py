"""Record the hangs of cases.py: ``python -m tests.recordings.hangs.record [CASE…]`` from the root of the project.

Paths of the recording machine are replaced.
"""

import shutil
import site
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.recordings.hangs import cases
from tests.support import hung_jobs

HERE = Path(__file__).parent
REPLACED = {
    str(HERE): "/home/user/training",
    site.getsitepackages()[0]: "/usr/lib/python3/site-packages",
    sysconfig.get_path("stdlib"): "/usr/lib/python3.11",
    str(hung_jobs.ROOT): "/home/user/tracekit",
}


def record(case: str) -> None:
    with tempfile.TemporaryDirectory(prefix="hang-") as folder:
        hung_jobs.run(case, Path(folder))
        target = HERE / case
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path in sorted(Path(folder).glob("rank*")):
            text = path.read_text()
            for old, new in {**REPLACED, folder: "/data/run"}.items():
                text = text.replace(old, new)
            (target / path.name).write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:] or [case.__name__ for case in cases.CASES]:
        record(name)
        print(name, flush=True)
