"""How much memory the KV cache may take: what this machine has, and the arithmetic from there to a number of blocks.

Knows sizes only: no model, no kernels, no requests.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.records import KVGroup
from octavo.kv_cache.groups import blocks_of_sequence, kinds_of

GIB = 1 << 30
DEFAULT_AVAILABLE_SHARE = 0.4  # the rest is left to the page cache, the HTTP process and whoever else is here
DEFAULT_LIMIT = 8 * GIB
SAFE_UTILIZATION = 0.95
KV_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes. total: of the machine, or of the control group if that allows less. available: without swapping, now."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that a model needs. block_bytes: of one cache block, with room for the layers of the largest KV group."""

    weight_bytes: int
    workspace_bytes: int
    block_bytes: int
    block_size: int  # tokens
    max_model_len: int  # tokens
    max_chunk: int  # tokens of one sequence that a step computes at most
    kv_cache_dtype: str  # resolved, not "auto"
    kv_groups: tuple[KVGroup, ...]

    def blocks_of_sequence(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks that a sequence of `num_tokens` holds while a step computes up to `max_chunk` of them."""
        return blocks_of_sequence(kinds_of(self.kv_groups), num_tokens, max_chunk, self.block_size)

    @property
    def blocks_of_one(self) -> int:
        """Most blocks that one sequence of full length holds in its life."""
        return self.blocks_of_sequence(self.max_model_len, self.max_chunk)

    @property
    def blocks_at_length(self) -> int:
        """Blocks that a sequence holds when it has reached the full length, token by token."""
        return self.blocks_of_sequence(self.max_model_len, 1)

    @property
    def slides(self) -> bool:
        """Whether some layers keep less than the full length."""
        return self.blocks_at_length < len(self.kv_groups) * -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What was decided. `rule` says what the size of the pool follows from."""

    machine: MachineMemory
    model: ModelMemory
    num_blocks: int
    rule: str
    warnings: tuple[str, ...] = ()

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.model.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of sequences of full length that fit."""
        model = self.model
        return self.num_blocks * model.block_size * model.max_model_len // self._room_of_one

    @property
    def _room_of_one(self) -> int:
        """Tokens of a full-length sequence, counted once in each KV group that keeps them."""
        model = self.model
        if not model.slides:
            return model.max_model_len * len(model.kv_groups)
        return model.blocks_at_length * model.block_size

    def rows(self) -> list[tuple[str, str]]:
        """The table that is shown at start: (name, value)."""
        model = self.model
        largest = max(group.num_layers for group in model.kv_groups)
        layers = f" in {largest} layer{'s'[: largest > 1]}" if len(model.kv_groups) > 1 else ""
        rows = [
            (
                "total memory",
                f"{format_bytes(self.machine.total_bytes)} ({format_bytes(self.machine.available_bytes)} available)",
            ),
            ("weights", format_bytes(model.weight_bytes)),
            ("workspace", format_bytes(model.workspace_bytes)),
            ("KV pool", f"{format_bytes(self.kv_bytes)} of {model.kv_cache_dtype} ({self.rule})"),
            (
                "KV blocks",
                f"{self.num_blocks:,} of {model.block_size} tokens{layers}, {format_bytes(model.block_bytes)} each",
            ),
            ("KV tokens", f"{self.num_tokens:,}"),
            (
                "full-length sequences",
                f"{self.num_tokens / model.max_model_len:,.1f} of {model.max_model_len:,} tokens",
            ),
        ]
        return [*rows, ("sliding window", self._saving())] if model.slides else rows

    def _saving(self) -> str:
        """What the sliding window saves."""
        model = self.model
        sliding = [group for group in model.kv_groups if group.kind == "sliding"]
        windows = " or ".join(f"{window:,}" for window in sorted({group.window for group in sliding}))
        all_blocks = len(model.kv_groups) * -(-model.max_model_len // model.block_size)
        return (
            f"{sum(group.num_layers for group in sliding)} of {sum(group.num_layers for group in model.kv_groups)} "
            f"layers keep {windows} tokens: a full-length sequence takes "
            f"{format_bytes(model.blocks_at_length * model.block_bytes)} instead of "
            f"{format_bytes(all_blocks * model.block_bytes)}"
        )


def plan_memory(machine: MachineMemory, model: ModelMemory, config: EngineConfig) -> MemoryBudget:
    """Raises ConfigError if the pool is too small for one full sequence, or too large for the machine."""
    num_blocks, rule, more = _pool(machine, model, config)
    fixed = model.weight_bytes + model.workspace_bytes
    if num_blocks < model.blocks_of_one:
        raise ConfigError(_too_small(machine, model, num_blocks, rule, more))
    needed = fixed + num_blocks * model.block_bytes
    if needed > machine.total_bytes:
        raise ConfigError(
            f"weights, workspace and a KV pool of {num_blocks:,} blocks ({rule}) take {format_bytes(needed)}, but this "
            f"machine has {format_bytes(machine.total_bytes)}: choose less"
        )
    return MemoryBudget(machine, model, num_blocks, rule, _warnings(needed, machine, config.gpu_memory_utilization))


def longest_that_fits(machine: MachineMemory, model: ModelMemory, config: EngineConfig) -> int:
    """Tokens of the longest sequence that the pool has room for, at most model.max_model_len; 0 if there is none."""
    return _fitting(model, _pool(machine, model, config)[0], model.max_model_len)


def _fitting(model: ModelMemory, num_blocks: int, limit: int) -> int:
    lengths = range(1, limit + 1)
    return bisect_right(lengths, num_blocks, key=lambda n: model.blocks_of_sequence(n, model.max_chunk))


def _pool(machine: MachineMemory, model: ModelMemory, config: EngineConfig) -> tuple[int, str, str]:
    """The number of blocks, what says so, and what would give more.

    Said by --num-gpu-blocks-override, else by --kv-cache-memory-bytes; else --gpu-memory-utilization F gives total * F
    less weights and workspace; else it is the smallest of 40% of what is available beside weights and workspace, what
    max_num_seqs full sequences need, and 8 GiB.
    """
    fixed = model.weight_bytes + model.workspace_bytes
    if config.num_gpu_blocks_override is not None:
        num_blocks, rule, more = config.num_gpu_blocks_override, "--num-gpu-blocks-override", "a larger override"
    else:
        if config.kv_cache_memory_bytes is not None:
            pool, rule = config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
            more = "a larger --kv-cache-memory-bytes"
        elif config.gpu_memory_utilization is not None:
            pool = int(machine.total_bytes * config.gpu_memory_utilization) - fixed
            rule = f"{config.gpu_memory_utilization:.0%} of the total, less weights and workspace"
            more = "a larger --gpu-memory-utilization"
        else:
            available = int((machine.available_bytes - fixed) * DEFAULT_AVAILABLE_SHARE)
            # One step's chunk goes to one of the sequences, or is shared.
            chunk = model.blocks_of_one - model.blocks_at_length
            useful = (config.max_num_seqs * model.blocks_at_length + chunk) * model.block_bytes
            pool, rule = min(
                (available, f"{DEFAULT_AVAILABLE_SHARE:.0%} of the available memory"),
                (useful, f"{config.max_num_seqs} full sequences, --max-num-seqs"),
                (DEFAULT_LIMIT, "the default limit"),
            )
            more = "more free memory, --gpu-memory-utilization or --kv-cache-memory-bytes"
        num_blocks = max(0, pool) // model.block_bytes
    return num_blocks, rule, more


def read_machine_memory(root: Path = Path("/")) -> MachineMemory:
    """This machine's memory, bounded by the limits of the control groups (v1 or v2) that this process is in.

    Page cache that a group could drop at once counts as available, as it does in the kernel's MemAvailable.
    """
    meminfo = _numbers(root / "proc/meminfo")
    total, available = meminfo["MemTotal:"] * 1024, meminfo["MemAvailable:"] * 1024
    for group in _control_groups(root):
        v2 = (group / "memory.max").exists()
        limit = _number(group / ("memory.max" if v2 else "memory.limit_in_bytes"))
        usage = _number(group / ("memory.current" if v2 else "memory.usage_in_bytes"))
        if limit is None or usage is None:
            continue
        droppable = _numbers(group / "memory.stat").get("inactive_file" if v2 else "total_inactive_file", 0)
        total = min(total, limit)
        available = min(available, max(0, limit - max(0, usage - droppable)))
    return MachineMemory(total, available)


def _too_small(machine: MachineMemory, model: ModelMemory, num_blocks: int, rule: str, more: str) -> str:
    fits = _fitting(model, num_blocks, model.max_model_len - 1)
    needed = model.blocks_of_one * model.block_bytes
    ways = [f"--max-model-len {fits}"] if fits else []
    grows = "smaller --max-num-seqs and --max-num-batched-tokens, which the workspace grows with"
    if model.workspace_bytes > machine.available_bytes:
        ways.append(grows)  # no share of the memory would do
    else:
        ways.append(more)
    if KV_ELEMENT_BYTES[model.kv_cache_dtype] > min(KV_ELEMENT_BYTES.values()):
        ways.append("a smaller --kv-cache-dtype (bfloat16)")
    if model.blocks_at_length <= num_blocks:
        ways.append("a smaller --max-num-batched-tokens, the tokens that sliding layers keep beside their window")
    elif needed < model.workspace_bytes <= machine.available_bytes:
        ways.append(grows)
    size = format_bytes
    return (
        f"the KV cache has room for {fits:,} tokens ({size(num_blocks * model.block_bytes)}: {rule}), but one sequence "
        f"of {model.max_model_len:,} tokens needs {size(needed)}; of {size(machine.total_bytes)} memory "
        f"{size(machine.available_bytes)} are available, weights take {size(model.weight_bytes)} and workspace "
        f"{size(model.workspace_bytes)}: choose {', or '.join(ways)}"
    )


def _warnings(needed: int, machine: MachineMemory, utilization: float | None) -> tuple[str, ...]:
    warnings = []
    if utilization is not None and utilization > SAFE_UTILIZATION:
        warnings.append(
            f"--gpu-memory-utilization is {utilization}, above {SAFE_UTILIZATION}: the system has little left and may "
            "end this process when memory runs out; choose less"
        )
    if needed > machine.available_bytes:
        warnings.append(
            f"weights, workspace and KV pool can grow to {format_bytes(needed)}, but "
            f"{format_bytes(machine.available_bytes)} are available now: free memory or make the KV pool smaller"
        )
    return tuple(warnings)


def _control_groups(root: Path) -> list[Path]:
    """The folders of this process's memory group and its ancestors, as far as they are visible here."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        elif not controllers:
            mount = root / "sys/fs/cgroup"
        else:
            continue
        group = mount / path.lstrip("/")
        # Inside a container the path may be the host's: the group is then mounted as the top folder itself.
        folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(mount) and folder.is_dir()]
    return folders


def _number(path: Path) -> int | None:
    """None if there is no such file or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _numbers(path: Path) -> dict[str, int]:
    """The first two columns of a file, where the second is a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def format_bytes(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes / 1024:,.1f} KiB"
