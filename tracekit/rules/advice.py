"""Advice that follows what is recorded: on training or inference with PyTorch, or on another program."""

from dataclasses import dataclass

from tracekit.analysis.parallelism import workload
from tracekit.analysis.parallelism.workload import Program
from tracekit.model.run import Run


@dataclass(frozen=True)
class Advice:
    """What to do about a finding; what is not stated for a program is as for the one before."""

    training: str
    inference: str = ""
    other: str = ""
    """For programs without PyTorch, such as those that Nsight Systems records."""

    def suited_to(self, run: Run) -> str:
        """The advice for the program of a run."""
        program = workload.program(run)
        inference = self.inference or self.training
        if program is Program.OTHER:
            return self.other or inference
        return inference if program is Program.INFERENCE else self.training
