"""CUDA's own clock: how long the device worked on calls, whatever the host was doing meanwhile.

    device_seconds(call, calls=30, returned_s=4e-4)      # seconds per block, between two events on the device
    facts(uuid)                                          # driver, clocks, temperature, power, throttle reasons

A kernel that only waits is queued first, so that the calls are already queued when the first of them starts: gaps in
which the host was late do not count. Everything here is asked for on CUDA devices only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_LONGEST_BACKLOG_S = 50e-3
_cuda: Any = torch.cuda
"""Its events and streams carry no types of their own."""


def device_seconds(call: Callable[[], object], calls: int, returned_s: float) -> float:
    """Device time of `calls` calls. `returned_s` is how long the host takes to queue them: the backlog covers it."""
    clock_hz = 1e3 * float(_cuda.get_device_properties(_cuda.current_device()).clock_rate)
    cycles = int(min(_LONGEST_BACKLOG_S, 1.5 * returned_s + 100e-6) * clock_hz)
    start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    _cuda.synchronize()
    _cuda._sleep(cycles)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def facts(uuid: str | None) -> dict[str, Any]:
    """What NVML tells of one GPU now; what a driver does not support is left out."""
    try:
        import pynvml
    except ImportError:
        return {}
    told: dict[str, Any] = {"uuid": uuid}
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
            for name, ask in _questions(pynvml, handle).items():
                with suppress(pynvml.NVMLError):
                    told[name] = ask()
        finally:
            pynvml.nvmlShutdown()
    return told


def _questions(nvml: Any, handle: Any) -> dict[str, Callable[[], Any]]:
    return {
        "name": lambda: nvml.nvmlDeviceGetName(handle),
        "uuid": lambda: nvml.nvmlDeviceGetUUID(handle),
        "driver": nvml.nvmlSystemGetDriverVersion,
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "max_sm_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "persistence": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)),
        "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
        "processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    }
