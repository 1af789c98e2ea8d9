"""The fingerprint of where a measurement was taken: what pyperf records, and what torch adds to it.

    before = Load.now(cores)
    ...                                     # measure
    during = Load.now(cores).since(before)  # steal, our share, others' share of these cores
    host_facts(cores)                       # CPU, governor, turbo, memory, NUMA, library versions

No torch here: torch's own flags are read inside a contestant (`torch_facts` in `worker.contestants.runner`), where they
hold. Every fact that a machine does not tell is None, never a guess.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "numpy", "scipy", "triton", "onnx", "onnxruntime", "onnxscript", "torchstone")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@cache
def libraries() -> dict[str, str]:
    """The versions of what matters here and is installed; looked up once per process and those forked from it."""
    return {name: found for name in LIBRARIES if (found := _version(name))}


def frequency_mhz(core: int = 0) -> float | None:
    """The clock of a core now, where the kernel tells it."""
    told = _int(_read(Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq")))
    if told is not None:
        return told / 1000
    text = _read(Path("/proc/cpuinfo")) or ""
    lines = [line for line in text.splitlines() if line.startswith("cpu MHz")]
    return float(lines[core].split(":")[1]) if core < len(lines) else None


def host_facts(cores: tuple[int, ...]) -> dict[str, Any]:
    """The machine as it is now; `cores` are those that the contestants are pinned to."""
    info = _cpuinfo()
    system = Path("/sys/devices/system")
    frequency = system / f"cpu/cpu{cores[0]}/cpufreq"
    return {
        "hostname": platform.node(),
        "system": platform.platform(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_model": info.get("model name"),
        "cpu_flags": sorted(set(info.get("flags", "").split()) & _TELLING_FLAGS),
        "hypervisor": "hypervisor" in info.get("flags", "").split(),
        "cpu_count": os.cpu_count(),
        "cores": list(cores),
        "governor": _read(frequency / "scaling_governor"),
        "frequency_driver": _read(frequency / "scaling_driver"),
        "frequency_mhz": frequency_mhz(cores[0]),
        "max_frequency_khz": _int(_read(frequency / "cpuinfo_max_freq")),
        "turbo": _turbo(system),
        "smt": _read(system / "cpu/smt/active") == "1",
        "isolated_cores": _read(system / "cpu/isolated") or None,
        "numa_nodes": len(list((system / "node").glob("node[0-9]*"))) or None,
        "aslr": _int(_read(Path("/proc/sys/kernel/randomize_va_space"))),
        "transparent_hugepages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_limit_bytes": _int(_read(Path("/sys/fs/cgroup/memory.max"))),
        "load_1min": os.getloadavg()[0],
        "uptime_s": float((_read(Path("/proc/uptime")) or "0").split()[0]),
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "clock_resolution_s": time.get_clock_info("perf_counter").resolution,
        "libraries": libraries(),
        "variables": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(_TELLING_VARIABLES)},
    }


_TELLING_FLAGS = {
    "avx",
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "fma",
    "f16c",
    "asimd",
    "sve",
}
_TELLING_VARIABLES = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "TORCHINDUCTOR_",
    "CUDA_VISIBLE",
    "LD_PRELOAD",
)


@dataclass(frozen=True)
class Load:
    """CPU time so far: of the cores, stolen by the hypervisor, and used by this process and its contestants."""

    at_s: float
    busy_s: float
    steal_s: float
    ours_s: float
    cores: int
    throttles: int
    swaps: int

    @classmethod
    def now(cls, cores: tuple[int, ...], pids: tuple[int, ...] = (), children: bool = False) -> Load:
        """Read it now; `pids` are the contestants, whose time is ours, and `children` those that have ended."""
        wanted = {f"cpu{core}" for core in cores}
        busy, steal = 0, 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in wanted:
                user, nice, system, _, _, irq, softirq, stolen = (int(f) for f in fields[:8])
                busy, steal = busy + user + nice + system + irq + softirq, steal + stolen
        own = resource.getrusage(resource.RUSAGE_SELF)
        is_here = not os.sched_getaffinity(0).isdisjoint(cores)
        ours_s = (own.ru_utime + own.ru_stime) * is_here + sum(_cpu_time_s(pid) for pid in pids)
        if children:
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)
            ours_s += ended.ru_utime + ended.ru_stime
        throttles = sum(
            _int(_read(Path(f"/sys/devices/system/cpu/cpu{c}/thermal_throttle/core_throttle_count"))) or 0
            for c in cores
        )
        return cls(
            time.perf_counter(), busy / _TICKS_PER_S, steal / _TICKS_PER_S, ours_s, len(cores), throttles, own.ru_nswap
        )

    def since(self, before: Load) -> dict[str, Any]:
        """What happened between two readings: shares of the cores' time (0 to 1), and counts."""
        capacity_s = max(1e-9, (self.at_s - before.at_s) * self.cores)
        busy_s, ours_s = self.busy_s - before.busy_s, self.ours_s - before.ours_s
        return {
            "seconds": self.at_s - before.at_s,
            "steal_share": (self.steal_s - before.steal_s) / capacity_s,
            "our_share": ours_s / capacity_s,
            # /proc counts in ticks of 10 ms: a difference smaller than that is nobody's.
            "other_share": max(0.0, busy_s - ours_s) / capacity_s,
            "throttles": self.throttles - before.throttles,
        }


def _cpu_time_s(pid: int) -> float:
    stat = _read(Path(f"/proc/{pid}/stat"))
    if stat is None:
        return 0.0
    user, system = stat.rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / _TICKS_PER_S


def _cpuinfo() -> dict[str, str]:
    text = _read(Path("/proc/cpuinfo")) or ""
    pairs = (line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _turbo(system: Path) -> bool | None:
    no_turbo = _read(system / "cpu/intel_pstate/no_turbo")
    if no_turbo is not None:
        return no_turbo == "0"
    boost = _read(system / "cpu/cpufreq/boost")
    return None if boost is None else boost == "1"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
