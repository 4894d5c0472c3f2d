"""How processes that share one machine's cores keep out of each other's way.

Worker and verifier alternate: one drafts while the other waits. Both may use every core, but neither may spin while it
waits: two spinning OpenMP teams on two cores make each forward pass many times slower. So every role starts with
passive waits, one thread per core that it may run on, and (for CPU work with big temporaries) a raised mmap threshold,
because glibc otherwise returns and refaults such buffers at every operation.

`prepare` must run before torch is imported: the OpenMP runtime reads its environment when it is loaded.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30
MAX_THREADS = 16
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
# A forward pass is hundreds of short parallel regions: waking a sleeping team for each costs a quarter of the pass, so
# threads look for work for some 50 microseconds before they sleep. A team whose role waits for the other one sleeps.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "0"}


@dataclass(frozen=True, slots=True)
class Placement:
    """threads: OpenMP threads of each role; cores: the CPUs that this process may run on."""

    threads: int
    cores: tuple[int, ...]

    def environment(self) -> dict[str, str]:
        """What a role's process needs in its environment."""
        return {**PASSIVE, "OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}


def choose(threads: int | None = None, environment: Mapping[str, str] = os.environ) -> Placement:
    """Threads: the argument, else a user's OMP_NUM_THREADS, else one per available core (at most 16).

    A container's CPU quota counts as that many cores: more threads would only be stopped in the middle of a product.
    """
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (0,)
    wished = environment.get("OMP_NUM_THREADS", "")
    usable = min(MAX_THREADS, len(cores), cpu_quota() or MAX_THREADS)
    default = int(wished) if wished.isdigit() and int(wished) > 0 else usable
    return Placement(threads or default, cores)


def cpu_quota(file: Path = CPU_MAX) -> int | None:
    """Whole cores of the cgroup's CPU quota, at least one; None without a quota ("max") or without cgroups."""
    try:
        quota, period = file.read_text("utf-8").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))


def prepare(placement: Placement) -> None:
    """Set up this process. Must be called before torch is imported."""
    if "torch" in sys.modules:
        raise RuntimeError("placement.prepare() was called after torch was imported: OpenMP is set up by then")
    os.environ.update(placement.environment())
    keep_big_buffers()


def keep_big_buffers() -> None:
    """Let glibc keep freed buffers up to 1 GiB instead of unmapping them (no effect elsewhere)."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def cpu_flags() -> frozenset[str]:
    """Feature flags of the first CPU as Linux names them; empty where that is not known."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return frozenset()
    for line in info.read_text("utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def fast_bf16() -> bool:
    """True where this CPU multiplies bf16 natively; elsewhere bf16 is emulated and fp32 is faster."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def choose_dtype(name: str, device: str) -> str:
    """`auto` becomes bf16 on CUDA and on CPUs with native bf16, fp32 elsewhere."""
    if name != "auto":
        return name
    return "bf16" if device.startswith("cuda") or fast_bf16() else "fp32"
