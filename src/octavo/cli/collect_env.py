"""`octavo collect-env`: what a bug report should say of a machine and an installation. No keys, no tokens."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from octavo.cli.table import format_table
from octavo.core.errors import ConfigError
from octavo.core.version import version

EXTRA_PACKAGES = ("torch", "transformers", "triton", "ray", "openai")  # not ours, but what users have beside us
VARIABLES = ("OCTAVO_", "VLLM_", "HF_", "HUGGINGFACE_", "OMP_", "MKL_", "CUDA_", "LD_PRELOAD", "MALLOC_", "PYTHONPATH")
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "HEADER")
CGROUP_FILES = ("memory.max", "cpu.max", "cpuset.cpus.effective")
CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "sve")

Section = Sequence[tuple[str, str]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    sections = collect()
    if args.json:
        print(json.dumps({title: dict(rows) for title, rows in sections.items()}, indent=1))
        return 0
    print("\n\n".join(f"{title}\n{format_table(rows)}" for title, rows in sections.items()))
    return 0


def collect() -> dict[str, Section]:
    """Sections of (name, value) rows."""
    return {
        "octavo": _installation(),
        "machine": [*_system(), *_processor(), *_limits()],
        "packages": _packages(),
        "environment": _environment(os.environ),
    }


def _installation() -> Section:
    from octavo.engine.engine import system_info  # loads the kernels
    from octavo.engine.model_location import builtin_model

    try:
        kernels = system_info()
    except (ImportError, OSError) as error:  # what such a report is most wanted for
        kernels = [("kernels", f"cannot be loaded: {error}")]
    try:
        model = str(builtin_model())
    except ConfigError as error:
        model = str(error)
    return [("version", version()), ("folder", str(Path(__file__).parents[1])), *kernels, ("built-in model", model)]


def _system() -> Section:
    return [
        ("system", _os_name()),
        ("kernel", platform.release()),
        ("architecture", platform.machine()),
        ("C library", " ".join(platform.libc_ver())),
        ("Python", f"{sys.version.split()[0]} ({platform.python_compiler()})"),
        ("executable", sys.executable),
    ]


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _processor() -> Section:
    flags: set[str] = set()
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            break
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    caches = [
        f"L{_read(index / 'level')} {_read(index / 'type').lower()} {_read(index / 'size')}"
        for index in sorted(folder.glob("index*"))
    ]
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return [
        ("processor flags", ", ".join(flag for flag in CPU_FLAGS if flag in flags) or "none that matter here"),
        ("caches", ", ".join(caches) or "unknown"),
        ("NUMA nodes", str(nodes or "unknown")),
        ("cores", f"{os.cpu_count()}, {len(os.sched_getaffinity(0))} of them for this process"),
        ("huge pages", _read("/sys/kernel/mm/transparent_hugepage/enabled") or "unknown"),
    ]


def _limits() -> Section:
    rows = [(f"cgroup {name}", value) for name in CGROUP_FILES if (value := _read(f"/sys/fs/cgroup/{name}"))]
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    return [
        *rows,
        ("open files", "unlimited" if files == unlimited else str(files)),
        ("locked memory", "unlimited" if locked == unlimited else f"{locked} bytes"),
    ]


def _packages() -> Section:
    try:
        wanted = metadata.requires("octavo") or []
    except metadata.PackageNotFoundError:
        wanted = []
    own = [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in wanted if "extra ==" not in line]
    rows = []
    for name in (*own, *EXTRA_PACKAGES):
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            if name in own:
                rows.append((name, "MISSING"))
    return rows


def _environment(variables: Mapping[str, str]) -> Section:
    rows = []
    for name, value in sorted(variables.items()):
        if name.startswith(VARIABLES):
            secret = any(word in name for word in SECRET_WORDS)
            rows.append((name, "(set, not shown)" if secret else re.sub(r"//[^/\s]*@", "//(not shown)@", value)))
    return rows or [("", "nothing that concerns octavo")]


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
