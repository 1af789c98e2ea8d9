"""What NVML tells of how GPUs are connected: PCIe generation and width, NVLinks and who is at their other end.

    links("GPU-...")     # {"pcie": {"generation": 5, "width": 16, ...}, "nvlinks": [{"link": 0, "version": 4, ...}]}

What a driver or a card does not support is left out. No torch, no CUDA: asking does not make a context.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def links(uuid: str | None) -> dict[str, Any]:
    """The links of one GPU; empty where there is no NVML, or it does not know the GPU."""
    try:
        import pynvml
    except ImportError:
        return {}
    told: dict[str, Any] = {}
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
            told["pcie"] = _answered(pynvml, _pcie_questions(pynvml, handle))
            told["nvlinks"] = _nvlinks(pynvml, handle)
        finally:
            pynvml.nvmlShutdown()
    return told


def pcie_bytes_per_s(generation: int, width: int) -> float | None:
    """What a PCIe link carries one way after its line code (8b/10b up to generation 2, then 128b/130b; PAM4 flits from
    6 on, taken as 242/256), before packet headers; None for a generation that is not known.

    Source: PCI Express Base Specification, transfer rates of 2.5, 5, 8, 16, 32 and 64 GT/s a lane.
    """
    lanes = {1: 2.5e9 * 8 / 10, 2: 5e9 * 8 / 10, 3: 8e9 * 128 / 130, 4: 16e9 * 128 / 130, 5: 32e9 * 128 / 130}
    lanes[6] = 64e9 * 242 / 256
    return lanes[generation] * width / 8 if generation in lanes else None


def _pcie_questions(nvml: Any, handle: Any) -> dict[str, Callable[[], Any]]:
    return {
        # An idle link falls back to a lower generation: the current one tells what it is now.
        "generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "most_generation": lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "most_width": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
    }


def _nvlinks(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """Those that are up."""
    found = []
    for link in range(int(nvml.NVML_NVLINK_MAX_LINKS)):
        try:
            is_up = nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:  # the card has no such link
            continue
        if is_up:
            found.append({"link": link, **_answered(nvml, _nvlink_questions(nvml, handle, link))})
    return found


def _nvlink_questions(nvml: Any, handle: Any, link: int) -> dict[str, Callable[[], Any]]:
    return {
        "version": lambda: int(nvml.nvmlDeviceGetNvLinkVersion(handle, link)),
        "to": lambda: _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId),
    }


def _answered(nvml: Any, questions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, ask in questions.items():
        with suppress(nvml.NVMLError):
            told[name] = ask()
    return told


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
