"""RULES: every rule of tracekit, and those of plug-ins."""

from tracekit.model import plugins
from tracekit.rules.allocator import AllocatorRetry, CrossStreamSlack, FragmentedMemory, SteadyDeviceAllocation
from tracekit.rules.checkpoint import BlockingBackgroundSave, BlockingCheckpoint, CpuStarvation, GilContention
from tracekit.rules.checkpoint_policy import (
    AmplifiedRestore,
    LostOnPowerFailure,
    SeveralWriters,
    SuboptimalInterval,
    UnverifiedShards,
)
from tracekit.rules.collective_batching import ReducedEveryMicroBatch, SmallCollectives
from tracekit.rules.communication import ExposedCommunication
from tracekit.rules.compute import IdleTensorCores, MisalignedProducts, PartialWaves, UnfusedKernels, UnfusedOptimizer
from tracekit.rules.contention import ComputeSlowedByCopies, ContendedCompute, PreparationGap, StarvedCollectives
from tracekit.rules.cpu_ops import AnomalyMode, DeterministicFills, RepeatedCasts, SlowArithmetic, SmallOps
from tracekit.rules.data_quality import DoubtfulTrace
from tracekit.rules.device_slowdowns import ClockDrop, DeviceStall
from tracekit.rules.host import BlockingSync, DataStall, LateLaunch
from tracekit.rules.host_phases import GarbageCollection, Recompilation
from tracekit.rules.host_processors import InterruptedPython, OversubscribedHost
from tracekit.rules.memory_footprint import GrowingMemory, IdleReserve, LittleHeadroom, PeakOwner
from tracekit.rules.memory_reuse import ChangingSizes, NeedlessRecomputation, ReallocatedBuffers
from tracekit.rules.model_parallel import (
    ExposedTensorParallel,
    OverloadedExperts,
    ShardedMicroBatches,
    SlowPipelineLink,
    TensorParallelAcrossNodes,
)
from tracekit.rules.outlier_steps import ColdStart, OutlierStep
from tracekit.rules.pipeline import FewMicroBatches, PipelineBubble, UnbalancedStages
from tracekit.rules.roles import WaitingRole
from tracekit.rules.rule import Rule
from tracekit.rules.save_stalls import (
    CrowdedSave,
    GlobalSync,
    PlannedSave,
    SerializedSave,
    SlowStorage,
    SlowSync,
    StagedSave,
    StragglingWriter,
)
from tracekit.rules.side_work import SideWork
from tracekit.rules.slow_collectives import SlowLink, StalledCollective
from tracekit.rules.stragglers import LateGroup, OccasionalStraggler, Straggler, UnevenRanks
from tracekit.rules.streams import ExposedCopy, GiveWay, SerializedStreams

RULES: tuple[type[Rule], ...] = (
    ExposedCommunication, SmallCollectives, ReducedEveryMicroBatch, PreparationGap, GiveWay, SerializedStreams,
    ContendedCompute, StarvedCollectives, DeviceStall, ComputeSlowedByCopies, Straggler, SlowLink, UnevenRanks,
    LateGroup, OccasionalStraggler, PipelineBubble, UnbalancedStages, FewMicroBatches, ShardedMicroBatches,
    SlowPipelineLink, TensorParallelAcrossNodes, ExposedTensorParallel, OverloadedExperts, LateLaunch, BlockingSync,
    DataStall, ExposedCopy, Recompilation, GarbageCollection, OversubscribedHost, InterruptedPython, MisalignedProducts,
    IdleTensorCores, UnfusedOptimizer, UnfusedKernels, PartialWaves, SlowArithmetic, RepeatedCasts, SmallOps,
    AnomalyMode, DeterministicFills, SideWork, OutlierStep, ColdStart, ClockDrop, StalledCollective,
    SteadyDeviceAllocation, NeedlessRecomputation, GrowingMemory, LittleHeadroom, IdleReserve, PeakOwner,
    AllocatorRetry, FragmentedMemory, CrossStreamSlack, ChangingSizes, ReallocatedBuffers, BlockingCheckpoint,
    SerializedSave, StagedSave, SlowStorage, SlowSync, StragglingWriter, PlannedSave, GlobalSync, GilContention,
    CpuStarvation, BlockingBackgroundSave, AmplifiedRestore, SuboptimalInterval, LostOnPowerFailure,
    UnverifiedShards, CrowdedSave, SeveralWriters, WaitingRole, DoubtfulTrace,
)  # fmt: skip
"""Every rule. `tracekit explain CODE` prints what a rule measures, how to fix what it finds, and its blind spots."""


def all_rules() -> tuple[type[Rule], ...]:
    """Return our rules and those that other distributions add by the entry point group ``tracekit.rules``."""
    return RULES + tuple(point.load() for point in plugins.entry_points(group="tracekit.rules"))
