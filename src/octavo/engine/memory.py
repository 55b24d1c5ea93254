"""How much memory the KV cache may take: what this machine has, and the arithmetic from there to a number of blocks.

Knows sizes only: no model, no kernels, no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError

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
    """Bytes that a model needs. block_bytes: of one cache block, all layers."""

    weight_bytes: int
    workspace_bytes: int
    block_bytes: int
    block_size: int  # tokens
    max_model_len: int  # tokens
    kv_cache_dtype: str  # resolved, not "auto"


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
        return self.num_blocks * self.model.block_size

    def rows(self) -> list[tuple[str, str]]:
        """The table that is shown at start: (name, value)."""
        model = self.model
        return [
            (
                "total memory",
                f"{format_bytes(self.machine.total_bytes)} ({format_bytes(self.machine.available_bytes)} available)",
            ),
            ("weights", format_bytes(model.weight_bytes)),
            ("workspace", format_bytes(model.workspace_bytes)),
            ("KV pool", f"{format_bytes(self.kv_bytes)} of {model.kv_cache_dtype} ({self.rule})"),
            ("KV blocks", f"{self.num_blocks:,} of {model.block_size} tokens, {format_bytes(model.block_bytes)} each"),
            ("KV tokens", f"{self.num_tokens:,}"),
            (
                "full-length sequences",
                f"{self.num_tokens / model.max_model_len:,.1f} of {model.max_model_len:,} tokens",
            ),
        ]


def plan_memory(machine: MachineMemory, model: ModelMemory, config: EngineConfig) -> MemoryBudget:
    """The number of cache blocks.

    Said by --num-gpu-blocks-override, else by --kv-cache-memory-bytes; else --gpu-memory-utilization F gives total * F
    less weights and workspace; else it is the smallest of 40% of what is available beside weights and workspace, what
    max_num_seqs full sequences need, and 8 GiB. Raises ConfigError if one full sequence does not fit into the pool, or
    the pool not into the machine.
    """
    fixed = model.weight_bytes + model.workspace_bytes
    blocks_of_one = -(-model.max_model_len // model.block_size)
    if config.num_blocks_override is not None:
        num_blocks, rule, more = config.num_blocks_override, "--num-gpu-blocks-override", "a larger override"
    else:
        if config.kv_cache_memory_bytes is not None:
            pool, rule = config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
            more = "a larger --kv-cache-memory-bytes"
        elif config.memory_utilization is not None:
            pool = int(machine.total_bytes * config.memory_utilization) - fixed
            rule = f"{config.memory_utilization:.0%} of the total, less weights and workspace"
            more = "a larger --gpu-memory-utilization"
        else:
            available = int((machine.available_bytes - fixed) * DEFAULT_AVAILABLE_SHARE)
            useful = config.max_num_seqs * blocks_of_one * model.block_bytes
            pool, rule = min(
                (available, f"{DEFAULT_AVAILABLE_SHARE:.0%} of the available memory"),
                (useful, f"{config.max_num_seqs} full sequences, --max-num-seqs"),
                (DEFAULT_LIMIT, "the default limit"),
            )
            more = "more free memory, --gpu-memory-utilization or --kv-cache-memory-bytes"
        num_blocks = max(0, pool) // model.block_bytes
    if num_blocks < blocks_of_one:
        raise ConfigError(_too_small(machine, model, num_blocks, rule, more))
    needed = fixed + num_blocks * model.block_bytes
    if needed > machine.total_bytes:
        raise ConfigError(
            f"weights, workspace and a KV pool of {num_blocks:,} blocks ({rule}) take {format_bytes(needed)}, but this "
            f"machine has {format_bytes(machine.total_bytes)}: choose less"
        )
    return MemoryBudget(machine, model, num_blocks, rule, _warnings(needed, machine, config.memory_utilization))


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
    fits = num_blocks * model.block_size
    needed = -(-model.max_model_len // model.block_size) * model.block_bytes
    ways = [f"--max-model-len {fits}"] if fits else []
    ways.append(more)
    if KV_ELEMENT_BYTES[model.kv_cache_dtype] > min(KV_ELEMENT_BYTES.values()):
        ways.append("a smaller --kv-cache-dtype (bfloat16)")
    if model.workspace_bytes > needed:
        ways.append("smaller --max-num-batched-tokens and --max-num-seqs, which the workspace grows with")
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
