"""Kineto files of ranks whose hosts launch kernels and wait for them: the device runs a kernel when it is free."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

from tests.support import kineto_files

LAUNCH_US, HOST_TID, STREAM = 5.0, 1, 7


class GpuHost:
    """One rank: times of its host and of its streams, and the events that a profiler records of both, in µs."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.host_us, self.correlation = 0.0, 0
        self.free_us: dict[int, float] = defaultdict(float)
        self.events: list[dict[str, object]] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        with self.span(f"ProfilerStep#{number}", "user_annotation"):
            yield
        self.host_us += 1

    @contextmanager
    def span(self, name: str, category: str = "cpu_op", **args: object) -> Iterator[None]:
        begin_us = self.host_us
        self.host_us += 0.5
        yield
        self.host_us += 0.5
        self.events.append(kineto_files.slice_(category, name, begin_us, self.host_us - begin_us, tid=HOST_TID, **args))

    def pause(self, dur_us: float) -> None:
        self.host_us += dur_us

    def queued(self, name: str, dur_us: float) -> None:
        """A kernel that was launched before the recording began."""
        self._run("kernel", name, dur_us, STREAM, {"correlation": 0})

    def kernel(
        self,
        name: str,
        dur_us: float,
        *,
        stream: int = STREAM,
        after_us: float = 0.0,
        op: str = "aten::op",
        inputs: Mapping[str, object] = MappingProxyType({}),
        **args: object,
    ) -> tuple[float, float]:
        """Launch a kernel from an op with `inputs`; its start and end.

        It starts when its stream is free, at `after_us` at the earliest.
        """
        with self.span(op, **{"External id": self.correlation + 1, **inputs}):
            self._launch("cudaLaunchKernel", LAUNCH_US)
        return self._run("kernel", name, dur_us, stream, {"correlation": self.correlation, **args}, after_us)

    def copy_to_host(self, dur_us: float) -> None:
        """Copy to the host, which waits for it."""
        self._launch("cudaMemcpyAsync", LAUNCH_US)
        where = {"correlation": self.correlation, "bytes": 4096}
        self._run("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", dur_us, STREAM, where)
        self.wait()

    def copy_to_device(self, dur_us: float) -> None:
        """Copy pageable memory to the device, on the stream of its kernels; the host waits for it."""
        self._launch("cudaMemcpyAsync", LAUNCH_US)
        where = {"correlation": self.correlation, "bytes": 1 << 24}
        self._run("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", dur_us, STREAM, where)
        self.wait()

    def copy_beside(self, dur_us: float, *, stream: int) -> tuple[float, float]:
        """Copy to the device on another stream; its start and end."""
        self._launch("cudaMemcpyAsync", LAUNCH_US)
        where = {"correlation": self.correlation, "bytes": 1 << 20}
        return self._run("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", dur_us, stream, where)

    def wait(self) -> None:
        """Let the host wait for all streams."""
        until_us = max([self.host_us, *self.free_us.values()]) + 2
        self._launch("cudaDeviceSynchronize", until_us - self.host_us)

    def write(self, folder: Path, groups: list[dict[str, object]] | None = None) -> None:
        of_job = {"rank": self.rank, "world_size": self.world_size, "pg_config": groups or []}
        header = {"deviceProperties": [{"id": 0, "name": "H100"}], "distributedInfo": {"backend": "nccl", **of_job}}
        document = kineto_files.trace(None, steps=0) | header | {"traceEvents": self.events}
        kineto_files.write(folder / f"rank{self.rank}.pt.trace.json", document)

    def _launch(self, name: str, dur_us: float) -> None:
        self.correlation += 1
        self.events.append(
            kineto_files.slice_("cuda_runtime", name, self.host_us, dur_us, tid=HOST_TID, correlation=self.correlation)
        )
        self.host_us += dur_us + 0.5

    def _run(
        self, category: str, name: str, dur_us: float, stream: int, args: dict[str, object], after_us: float = 0.0
    ) -> tuple[float, float]:
        start_us = max(self.host_us + 1, self.free_us[stream], after_us)
        self.free_us[stream] = start_us + dur_us + 1
        where = {"device": 0, "stream": stream, **args}
        self.events.append(kineto_files.slice_(category, name, start_us, dur_us, tid=stream, **where))
        return start_us, start_us + dur_us


@contextmanager
def common_step(hosts: Sequence[GpuHost], number: int) -> Iterator[None]:
    """A step of all ranks, each on the time of its own host."""
    with ExitStack() as steps:
        for host in hosts:
            steps.enter_context(host.step(number))
        yield


def all_reduce(hosts: list[GpuHost], dur_us: float, *, stream: int = 20, elements: int = 1 << 20) -> None:
    """Let all ranks reduce after their kernels, and compute only when that has ended.

    It begins on each rank when its kernels have ended, and ends on all `dur_us` after the last one has begun.
    """
    ranks = [host.rank for host in hosts]
    args = {"Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"}
    args |= {"Group size": len(ranks), "Process Group Name": "0", "Process Group Ranks": str(ranks)}
    launched_us = [host.host_us + LAUNCH_US + 2.5 for host in hosts]
    starts_us = [max(at_us, host.free_us[STREAM]) for at_us, host in zip(launched_us, hosts, strict=True)]
    end_us = max(starts_us) + dur_us
    for host, start_us in zip(hosts, starts_us, strict=True):
        host.free_us[stream] = start_us
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        host.kernel(name, end_us - start_us, stream=stream, after_us=start_us, **args)
        host.free_us[STREAM] = end_us + 1
