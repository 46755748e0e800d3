"""Pipeline parallelism: a model's layers divided into stages, which pass micro-batches to each other."""

from instrumented_trainers.parallelism.pipeline.model import PipelineModel, StageShapes
from instrumented_trainers.parallelism.pipeline.plan import PipelinePlan
from instrumented_trainers.parallelism.pipeline.replicated import ReplicatedPart, Zero1Part

__all__ = ["PipelineModel", "PipelinePlan", "ReplicatedPart", "StageShapes", "Zero1Part"]
