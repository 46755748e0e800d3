"""Child processes that run our own Python code: the only place that builds their commands.

By default Python imports from the current folder first (`-m`, `-c`) or from the folder of the script. The current
folder is often a folder of somebody else's traces, and a file `tracekit/__init__.py` there would run. So each child
starts with `-P`, and its environment makes its own children do the same. Programs of the user (a training that is
recorded) are started by `capture/launcher` instead, with the paths that Python gives them.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
_NEEDED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ", "LANG", "LC_ALL")
_ROOT = str(Path(__file__).parents[2])
# Python 3.10, in which the recorder works too, has no -P: there the program below removes the current folder itself.
_SAFE_PATH = ["-P"] if sys.version_info >= (3, 11) else []
# The child imports the same tracekit as this process, also from a checkout that is not installed.
_RUN_MODULE = """
import sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
import runpy
root, module = sys.argv[1:3]
del sys.argv[1:3]
if root not in sys.path:
    sys.path.insert(0, root)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def module_command(module: str, *words: str) -> list[str]:
    """Command that runs a module of tracekit, or of a package installed with it, with `words` as arguments."""
    return [sys.executable, *_SAFE_PATH, "-c", _RUN_MODULE, _ROOT, module, *words]


def script_command(script: os.PathLike[str], *words: str) -> list[str]:
    """Command that runs a file of ours, with `words` as arguments."""
    return [sys.executable, *_SAFE_PATH, os.fspath(script), *words]


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a child: `variables` (default: those of this process), and the safe path for its own children."""
    return {**(os.environ if variables is None else variables), SAFE_PATH_VARIABLE: "1"}


def bare_environment() -> dict[str, str]:
    """Environment of a child that reads what others wrote: what the interpreter needs, nothing private."""
    return environment({name: os.environ[name] for name in _NEEDED_VARIABLES if name in os.environ})


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Give processes that a library starts meanwhile (multiprocessing, Dask) the safe path.

    Such libraries start Python with `-c`, and take `-P` from the flags of this process or from its environment.
    """
    if SAFE_PATH_VARIABLE in os.environ or getattr(sys.flags, "safe_path", False):
        yield
        return
    os.environ[SAFE_PATH_VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH_VARIABLE, None)
