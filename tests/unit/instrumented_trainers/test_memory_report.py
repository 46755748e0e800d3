from pathlib import Path

import pytest

from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.memory import Footprint, MeasuredMemory, MemoryReport, predict_footprint
from instrumented_trainers.parallelism import ShardOptions

MIB = 1 << 20


def test_the_table_shows_the_rank_with_the_highest_peak() -> None:
    formula = Footprint(4 * MIB, 4 * MIB, 8 * MIB, None, 3 * MIB)
    low = MeasuredMemory(Footprint(4 * MIB, 4 * MIB, 8 * MIB, 0, 3 * MIB), 20 * MIB, None)
    high = MeasuredMemory(Footprint(4 * MIB, 4 * MIB, 8 * MIB, MIB // 2, 3 * MIB), 21 * MIB, None)
    assert MemoryReport(2, (formula, formula), (low, high)).as_text() == [
        "memory of rank 1 in step 2, MiB   predicted   measured",
        "  weights                              4.00       4.00",
        "  gradients                            4.00       4.00",
        "  optimizer                            8.00       8.00",
        "  buffers                                 —       0.50",
        "  activations                          3.00       3.00",
        "  sum                                 19.00      19.50",
        "  peak                                    —      21.00",
    ]


@pytest.mark.parametrize(
    ("strategy", "ranks", "gigabytes"), [("ddp", 1, 107.8), ("fsdp2", 64, 1.685), ("zero1", 64, 54.7)]
)
def test_a_7b_model_takes_the_memory_of_the_zero_paper(strategy: str, ranks: int, gigabytes: float) -> None:
    # 6.74e9 weights of 4 bytes, as many gradients, and two numbers each in the optimizer: 16 bytes per weight in all.
    config = TrainingConfig(strategy, Path("x"), model="7b", world_size=ranks)
    footprint = predict_footprint(config, ShardOptions(), rank=0)
    lasting = footprint.weights_bytes + footprint.gradients_bytes + footprint.optimizer_bytes
    assert lasting / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_memory_without_a_formula_is_none() -> None:
    config = TrainingConfig("ddp", Path("x"), precision="bf16")
    footprint = predict_footprint(config, ShardOptions(), rank=0)
    assert (footprint.buffers_bytes, footprint.activations_bytes) == (None, None)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "yafsdp"])
def test_the_shards_of_all_ranks_hold_the_whole_model_for_any_number_of_ranks(strategy: str) -> None:
    config = TrainingConfig(strategy, Path("x"), model="micro", world_size=7)
    footprints = [predict_footprint(config, ShardOptions(), rank) for rank in range(7)]
    states = sum(footprint.optimizer_bytes for footprint in footprints)
    assert 158_016 * 2 * 4 <= states <= 158_016 * 2 * 4 + 7 * 21 * 4
    assert sum(footprint.weights_bytes for footprint in footprints) >= 158_016 * 4
