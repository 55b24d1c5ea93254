from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.records import KVGroup
from octavo.engine.memory import MachineMemory, MemoryBudget, ModelMemory, plan_memory, read_machine_memory

MIB, GIB = 1 << 20, 1 << 30
MACHINE = MachineMemory(total_bytes=16 * GIB, available_bytes=10 * GIB)
MODEL = ModelMemory(
    weight_bytes=900 * MIB,
    workspace_bytes=100 * MIB,
    block_bytes=MIB,
    block_size=16,
    max_model_len=1000,
    max_chunk=100,
    kv_cache_dtype="bfloat16",
    kv_groups=(KVGroup("full", num_layers=4, num_kv_heads=2, head_dim=64),),
)
BLOCKS_OF_ONE = 63


def plan(
    *, machine: MachineMemory = MACHINE, weight_bytes: int = 900 * MIB, kv: str = "bfloat16", **options: object
) -> MemoryBudget:
    model = replace(MODEL, weight_bytes=weight_bytes, kv_cache_dtype=kv)
    return plan_memory(machine, model, EngineConfig(model="m.gguf", **options))  # type: ignore[arg-type]


def test_utilization_is_of_the_total_less_weights_and_workspace() -> None:
    assert plan(gpu_memory_utilization=0.5).num_blocks == 8 * 1024 - 1000


def test_by_default_the_pool_is_what_the_sequences_can_use() -> None:
    assert plan(max_num_seqs=2).num_blocks == 2 * BLOCKS_OF_ONE


def test_by_default_the_pool_is_at_most_40_percent_of_what_the_model_leaves_available() -> None:
    assert plan(max_num_seqs=1000).num_blocks == int((10 * 1024 - 1000) * 0.4)


def test_by_default_the_pool_is_at_most_8_gib() -> None:
    machine = MachineMemory(256 * GIB, 200 * GIB)
    assert plan(machine=machine, max_num_seqs=1000).num_blocks == 8 * 1024


def test_bytes_and_blocks_are_taken_at_their_word_and_blocks_win() -> None:
    assert plan(kv_cache_memory_bytes=GIB + 1, gpu_memory_utilization=0.9).num_blocks == 1024
    assert plan(num_gpu_blocks_override=70, kv_cache_memory_bytes=GIB).num_blocks == 70


def test_exactly_one_full_sequence_is_enough() -> None:
    assert plan(num_gpu_blocks_override=BLOCKS_OF_ONE).num_blocks == BLOCKS_OF_ONE


def test_too_small_for_one_sequence_is_refused_with_the_numbers_and_a_length_that_fits() -> None:
    with pytest.raises(ConfigError) as error:
        plan(kv_cache_memory_bytes=10 * MIB)
    text = str(error.value)
    for part in (
        "room for 160 tokens (10.00 MiB",
        "1,000 tokens needs 63.00 MiB",
        "weights take 900.00 MiB",
        "--max-model-len 160,",
        "a larger --kv-cache-memory-bytes",
    ):
        assert part in text
    assert "--kv-cache-dtype" not in text


def test_the_length_that_is_proposed_does_fit() -> None:
    config = EngineConfig(model="m.gguf", kv_cache_memory_bytes=10 * MIB)
    assert plan_memory(MACHINE, replace(MODEL, max_model_len=160), config).num_blocks == 10


def test_a_wide_cache_type_that_does_not_fit_is_told_of_the_narrow_ones() -> None:
    with pytest.raises(ConfigError, match=r"or a smaller --kv-cache-dtype \(bfloat16\)"):
        plan(num_gpu_blocks_override=10, kv="float32")


@pytest.mark.parametrize("utilization", [None, 0.5])
def test_weights_that_leave_nothing_are_refused_without_a_length_of_zero(utilization: float | None) -> None:
    with pytest.raises(ConfigError, match=r"room for 0 tokens.*weights take 20\.00 GiB") as error:
        plan(weight_bytes=20 * GIB, gpu_memory_utilization=utilization)
    assert "--max-model-len" not in str(error.value)


def test_a_workspace_that_leaves_nothing_is_told_with_the_flags_it_grows_with() -> None:
    model = replace(MODEL, workspace_bytes=20 * GIB)
    with pytest.raises(ConfigError, match="choose smaller --max-num-seqs and --max-num-batched-tokens") as error:
        plan_memory(MACHINE, model, EngineConfig(model="m.gguf"))
    assert "--kv-cache-memory-bytes" not in str(error.value), "no memory would be enough"


def test_a_pool_larger_than_the_machine_is_refused() -> None:
    assert plan(num_gpu_blocks_override=15 * 1024).num_blocks == 15 * 1024
    with pytest.raises(ConfigError, match=r"1,000,000 blocks \(--num-gpu-blocks-override\) take .* has 16\.00 GiB"):
        plan(num_gpu_blocks_override=1_000_000)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        plan(kv_cache_memory_bytes=16 * GIB)


def test_utilization_above_95_percent_is_warned_of() -> None:
    machine = MachineMemory(16 * GIB, 16 * GIB)
    assert plan(machine=machine, gpu_memory_utilization=0.95).warnings == ()
    (warning,) = plan(machine=machine, gpu_memory_utilization=0.97).warnings
    assert "0.97" in warning


def test_more_than_is_available_now_is_warned_of() -> None:
    (warning,) = plan(gpu_memory_utilization=0.8).warnings
    assert "12.80 GiB" in warning
    assert "10.00 GiB" in warning


def test_the_table_has_a_row_for_each_number() -> None:
    rows = dict(plan(num_gpu_blocks_override=100, kv="float16").rows())
    assert rows == {
        "total memory": "16.00 GiB (10.00 GiB available)",
        "weights": "900.00 MiB",
        "workspace": "100.00 MiB",
        "KV pool": "100.00 MiB of float16 (--num-gpu-blocks-override)",
        "KV blocks": "100 of 16 tokens, 1.00 MiB each",
        "KV tokens": "1,600",
        "full-length sequences": "1.6 of 1,000 tokens",
    }


# As Gemma 3 with 26 layers: in one pool of blocks for four layers each.
SLIDING = tuple(
    KVGroup(f"sliding {i}", num_layers=n, num_kv_heads=1, head_dim=256, kind="sliding", window=512)
    for i, n in enumerate([4, 4, 4, 4, 4, 2])
)
MIXED = replace(
    MODEL, max_model_len=32_768, max_chunk=2048, kv_groups=(KVGroup("full", 4, 1, 256), *SLIDING), block_bytes=MIB // 16
)
BLOCKS_AT_LENGTH = 2048 + 6 * 33
BLOCKS_OF_CHUNK = 6 * 128


def test_the_table_says_what_the_sliding_window_saves() -> None:
    config = EngineConfig(model="m.gguf", num_gpu_blocks_override=3 * BLOCKS_AT_LENGTH)
    rows = dict(plan_memory(MACHINE, MIXED, config).rows())
    assert rows["KV blocks"] == "6,738 of 16 tokens in 4 layers, 64.0 KiB each"
    assert rows["KV tokens"] == "98,304"
    assert rows["full-length sequences"] == "3.0 of 32,768 tokens"
    assert rows["sliding window"] == (
        "22 of 26 layers keep 512 tokens: a full-length sequence takes 140.38 MiB instead of 896.00 MiB"
    )


def test_a_window_as_long_as_a_sequence_saves_nothing_and_is_not_spoken_of() -> None:
    model = replace(MIXED, max_model_len=512)
    rows = dict(plan_memory(MACHINE, model, EngineConfig(model="m.gguf", num_gpu_blocks_override=448)).rows())
    assert "sliding window" not in rows
    assert rows["KV tokens"] == "1,024"
    assert rows["full-length sequences"] == "2.0 of 512 tokens"


def test_by_default_sliding_layers_get_a_window_for_each_sequence_and_one_chunk() -> None:
    budget = plan_memory(MACHINE, MIXED, EngineConfig(model="m.gguf", max_num_seqs=2))
    assert budget.num_blocks == 2 * BLOCKS_AT_LENGTH + BLOCKS_OF_CHUNK


def test_one_sequence_needs_room_for_its_window_and_a_chunk() -> None:
    needed = BLOCKS_AT_LENGTH + BLOCKS_OF_CHUNK
    config = EngineConfig(model="m.gguf", num_gpu_blocks_override=needed)
    assert plan_memory(MACHINE, MIXED, config).num_blocks == needed
    with pytest.raises(ConfigError, match=r"--max-model-len 32752, or .*a smaller --max-num-batched-tokens"):
        plan_memory(MACHINE, MIXED, replace(config, num_gpu_blocks_override=needed - 1))
    shorter = replace(MIXED, max_model_len=32_752)
    assert plan_memory(MACHINE, shorter, replace(config, num_gpu_blocks_override=needed - 1)).num_blocks == needed - 1
    with pytest.raises(ConfigError, match=r"room for 16 tokens"):
        plan_memory(MACHINE, MIXED, replace(config, num_gpu_blocks_override=7))


def machine_files(root: Path, **files: str) -> Path:
    """A fake root folder; names have "__" for "/"."""
    contents = {"proc__meminfo": "MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable: 5000 kB\n", **files}
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_without_control_groups_has_what_meminfo_says(tmp_path: Path) -> None:
    assert read_machine_memory(machine_files(tmp_path)) == MachineMemory(8000 * 1024, 5000 * 1024)


def test_a_limit_of_cgroup_v2_bounds_total_and_available_without_the_page_cache(tmp_path: Path) -> None:
    root = machine_files(
        tmp_path,
        proc__self__cgroup="0::/\n",
        **{
            "sys__fs__cgroup__memory.max": "4096000\n",
            "sys__fs__cgroup__memory.current": "3000000\n",
            "sys__fs__cgroup__memory.stat": "anon 1000000\ninactive_file 2000000\n",
        },
    )
    assert read_machine_memory(root) == MachineMemory(4096000, 4096000 - 1000000)


def test_a_limit_of_an_ancestor_counts(tmp_path: Path) -> None:
    group = "sys__fs__cgroup__user"
    root = machine_files(
        tmp_path,
        proc__self__cgroup="0::/user/session\n",
        **{
            f"{group}__memory.max": "2048000\n",
            f"{group}__memory.current": "48000\n",
            f"{group}__session__memory.max": "max\n",
            f"{group}__session__memory.current": "48000\n",
        },
    )
    assert read_machine_memory(root) == MachineMemory(2048000, 2000000)


def test_a_limit_of_cgroup_v1_counts_and_its_absence_is_a_huge_number(tmp_path: Path) -> None:
    group = "sys__fs__cgroup__memory"
    root = machine_files(
        tmp_path,
        proc__self__cgroup="5:cpu:/\n4:memory:/docker/abc\n0::/\n",
        **{
            f"{group}__memory.limit_in_bytes": "3000000\n",  # in a container its own group is the top folder
            f"{group}__memory.usage_in_bytes": "2500000\n",
            f"{group}__memory.stat": "inactive_file 5\ntotal_inactive_file 500000\n",
        },
    )
    assert read_machine_memory(root) == MachineMemory(3000000, 1000000)
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert read_machine_memory(root) == MachineMemory(8000 * 1024, 5000 * 1024)


def test_a_group_that_is_above_its_limit_has_nothing_available(tmp_path: Path) -> None:
    root = machine_files(
        tmp_path,
        proc__self__cgroup="0::/\n",
        **{"sys__fs__cgroup__memory.max": "1000\n", "sys__fs__cgroup__memory.current": "3000\n"},
    )
    assert read_machine_memory(root) == MachineMemory(1000, 0)


def test_this_machine_can_be_read() -> None:
    machine = read_machine_memory()
    assert 0 < machine.available_bytes <= machine.total_bytes
