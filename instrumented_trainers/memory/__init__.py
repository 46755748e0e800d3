"""What a training's memory goes to, by formula and measured: weights, gradients, optimizer, buffers, activations."""

from instrumented_trainers.memory.footprint import Footprint
from instrumented_trainers.memory.measured import MeasuredMemory, MemoryMeter
from instrumented_trainers.memory.predicted import predict_footprint
from instrumented_trainers.memory.report import MemoryReport, MemoryWatch

__all__ = ["Footprint", "MeasuredMemory", "MemoryMeter", "MemoryReport", "MemoryWatch", "predict_footprint"]
