"""What a number was measured on: hardware, versions, threads, allocator. Stored beside every result."""

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PEERS = ("fla-core", "liger-kernel", "flash-attn-res", "fast-attnres")
ALLOCATOR_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_CONF", "LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
KEEP_MEMORY = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
"""GLIBC_TUNABLES under which freed memory is used again instead of going back to the kernel, which would otherwise
zero it anew, page by page, for every large temporary."""


def describe() -> dict[str, Any]:
    """As JSON can hold it."""
    return {
        "device": device_name(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "blockres": _version("blockres"),
        "peers": {name: version for name in PEERS if (version := _version(name)) is not None},
        "commit": _commit(),
        "allocator": {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ} or "default",
    }


def summary(environment: dict[str, Any]) -> str:
    """One line for the head of a table or the foot of a plot."""
    place = environment["device"] or f"{environment['cpu']}, {environment['threads']} of {environment['cores']} cores"
    versions = {name: environment[name] for name in ("torch", "triton", "blockres")} | environment["peers"]
    return f"{place}; {', '.join(map(' '.join, versions.items()))}; commit {environment['commit']}"


def save(path: Path | None, kind: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write rows with their environment, as `bench.report` reads them; nothing where there is no path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"kind": kind, "environment": describe(), "rows": rows} | more, indent=1))


def device_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    root = Path(__file__).parent
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.strip()
