"""Runs at the start of every Python that `tracekit record` starts: waits for torch, and costs nothing without it.

Python imports one ``sitecustomize`` at its start, the first on its path. This one steps aside for the one it hides.
"""

# mypy: ignore-errors
# Neither typing nor pathlib is imported: that would cost each Python that starts milliseconds.

import contextlib
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
_ROOT = os.path.abspath(os.path.join(_HERE, *[os.pardir] * 4))  # noqa: PTH100, PTH118


class _Ours:
    """Finds tracekit where this file lies, so that recorder and launcher are of one version."""

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        """Module spec of tracekit."""
        return importlib.machinery.PathFinder.find_spec(name, [_ROOT]) if name == "tracekit" else None


class _Wait:
    """Calls the recorder after modules of interest are imported."""

    def __init__(self, *modules):
        self.modules = set(modules)

    def find_spec(self, name, path=None, target=None):
        """Module's spec, whose loader reports when the module is loaded."""
        if name not in self.modules:
            return None
        self.modules.discard(name)
        spec = next(
            filter(None, (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)), None
        )
        load = getattr(spec and spec.loader, "exec_module", None)
        if load is not None:

            def exec_module(module):
                spec.loader.__dict__.pop("exec_module", None)
                load(module)
                _notify(name)

            with contextlib.suppress(AttributeError):  # a loader that takes no attributes: then nothing is recorded
                spec.loader.exec_module = exec_module
        return spec


def _notify(name):
    try:
        from tracekit.capture import auto_recorder

        auto_recorder.on_import(name)
    except Exception as error:  # noqa: BLE001 whatever fails here, the training goes on
        sys.stderr.write(f"tracekit: not recorded: {type(error).__name__}: {error}; training goes on\n")


def _step_aside():
    """Import the sitecustomize that this one hides."""
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != _HERE]  # noqa: PTH100
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError:
        if ours is not None:
            sys.modules["sitecustomize"] = ours


if os.environ.get("TRACEKIT_RECORD"):
    sys.meta_path.insert(0, _Ours())
    sys.meta_path.insert(0, _Wait("torch", "torch.distributed.checkpoint", "safetensors.torch"))
_step_aside()
