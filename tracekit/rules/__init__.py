"""Judgements, one family per module. `RULES` lists them all."""

from importlib.metadata import entry_points

from tracekit.rule import Rule
from tracekit.rules.batching import ReducedEveryMicroBatch, SmallCollectives
from tracekit.rules.beside import BlockingBackgroundSave, CrowdedOut, LockedOut
from tracekit.rules.checkpoint import BlockingCheckpoint
from tracekit.rules.churn import AlternatingBuffers, ChangingSizes
from tracekit.rules.comm import ExposedCommunication, PreparationGap
from tracekit.rules.contended import ContendedCompute, StarvedCollectives
from tracekit.rules.data import DoubtfulTrace
from tracekit.rules.footprint import GrowingMemory, IdleReserve, LittleHeadroom, PeakOwner
from tracekit.rules.fragmentation import CrossStreamSlack, FragmentedMemory
from tracekit.rules.host import BlockingSync, DataStall, LateLaunch
from tracekit.rules.link import SlowLink
from tracekit.rules.memory import AllocatorRetry, SteadyDeviceAllocation
from tracekit.rules.rank import Straggler
from tracekit.rules.recomputation import NeedlessRecomputation
from tracekit.rules.safekeeping import AmplifiedRestore, LostOnPowerFailure, UnverifiedShards, UnwiseInterval
from tracekit.rules.stalled import (
    GlobalSync,
    PlannedSave,
    SerializedSave,
    SlowStorage,
    SlowSync,
    StagedSave,
    StragglingWriter,
)
from tracekit.rules.stream import GiveWay, NeedlessOrder
from tracekit.rules.uneven import UnevenRanks

RULES: tuple[type[Rule], ...] = (
    ExposedCommunication,
    SmallCollectives,
    ReducedEveryMicroBatch,
    PreparationGap,
    GiveWay,
    NeedlessOrder,
    ContendedCompute,
    StarvedCollectives,
    Straggler,
    SlowLink,
    UnevenRanks,
    LateLaunch,
    BlockingSync,
    DataStall,
    SteadyDeviceAllocation,
    NeedlessRecomputation,
    GrowingMemory,
    LittleHeadroom,
    IdleReserve,
    PeakOwner,
    AllocatorRetry,
    FragmentedMemory,
    CrossStreamSlack,
    ChangingSizes,
    AlternatingBuffers,
    BlockingCheckpoint,
    SerializedSave,
    StagedSave,
    SlowStorage,
    SlowSync,
    StragglingWriter,
    PlannedSave,
    GlobalSync,
    LockedOut,
    CrowdedOut,
    BlockingBackgroundSave,
    AmplifiedRestore,
    UnwiseInterval,
    LostOnPowerFailure,
    UnverifiedShards,
    DoubtfulTrace,
)


def all_rules() -> tuple[type[Rule], ...]:
    """Return our rules and those that other distributions add by the entry point group ``tracekit.rules``."""
    return RULES + tuple(point.load() for point in entry_points(group="tracekit.rules"))
