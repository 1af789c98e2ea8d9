"""What this host has: CUDA devices found through NVML, else CPU devices: disjoint groups of the usable cores.

    devices = discover(settings)      # [Device("cpu:0", "cpu", cores=(0,)), Device("cpu:1", "cpu", cores=(1,))]

Never imports torch: a job's devices are decided before torch loads a driver, and a GPU is pinned by its UUID.
Usable cores are those of this process's affinity, fewer where a container's CPU quota allows fewer at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import structlog

from torchstone.errors import SetupError
from torchstone.settings import Settings

MEMORY_SHARE = 0.8
"""The part of the host's memory that jobs may take, where no limit is set."""
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Device:
    """A thing that a job can hold: its name, its type, the cores that go with it, and a GPU's UUID and memory."""

    name: str
    type: str
    cores: tuple[int, ...]
    description: str
    uuid: str | None = None
    memory_bytes: int | None = None

    def is_same_as(self, other: dict[str, Any]) -> bool:
        """Whether another worker's device, as its document, is the same hardware, or a part of it, by whatever name."""
        if self.type != other["type"]:
            return False
        return bool(set(self.cores) & set(other["cores"])) if self.uuid is None else self.uuid == other["uuid"]

    def document(self) -> dict[str, Any]:
        """As GET /v1/devices shows it."""
        return asdict(self)


def discover(settings: Settings) -> list[Device]:
    """The devices that this worker owns: those named in `settings.devices`, else all CUDA ones, else all CPU ones.

    Raises SetupError for a name that this host does not have.
    """
    cores = usable_cores()
    cuda = _cuda_devices(cores)
    cpu = cpu_devices(cores, settings.cpu_devices, _numa_nodes())
    if not settings.devices:
        return cuda if cuda and settings.cpu_devices is None else cpu
    known = {device.name: device for device in [*cuda, *cpu]}
    names = [name.strip() for name in settings.devices.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise SetupError(f"device {name!r} is not on this host; it has: {', '.join(known)}")
    if len(set(names)) != len(names):
        raise SetupError(f"devices {settings.devices!r}: a device is named twice")
    return [known[name] for name in names]


def cpu_devices(cores: list[int], count: int | None, nodes: list[list[int]]) -> list[Device]:
    """`cores` as disjoint groups of equal size (the first ones get what is left over), one device each.

    By default one group a NUMA node, at least two where there are two cores. SMT siblings, and cores of one node, stay
    together. Raises SetupError when there are fewer cores than groups.
    """
    node_of = {core: index for index, node in enumerate(nodes) for core in node}
    ordered = sorted(cores, key=lambda core: (node_of.get(core, 0), _first_sibling(core), core))
    used_nodes = {node_of.get(core, 0) for core in cores}
    count = count or max(len(used_nodes), min(2, len(cores)))
    if count > len(cores):
        raise SetupError(
            f"{count} CPU devices asked for, but only {len(cores)} cores are usable: at least one core each"
        )
    model = _cpu_model()
    devices = []
    for index in range(count):
        group = ordered[_edge(len(ordered), index, count) : _edge(len(ordered), index + 1, count)]
        word = "core" if len(group) == 1 else "cores"
        description = f"{model}, {len(group)} {word}"
        devices.append(Device(f"cpu:{index}", "cpu", tuple(sorted(group)), description))
    return devices


def _edge(total: int, index: int, parts: int) -> int:
    """Where part `index` of `total` things split into `parts` begins; earlier parts get the remainder."""
    return index * (total // parts) + min(index, total % parts)


def usable_cores() -> list[int]:
    """The cores this process may use: its affinity, cut to a container's CPU quota."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = _cpu_quota()
    return cores if quota is None else cores[: max(1, math.floor(quota))]


def memory_limit_bytes(settings: Settings) -> int:
    """What jobs on this host may take in all: the setting, else 80 % of the host's or the container's memory."""
    if settings.memory_limit_bytes is not None:
        return settings.memory_limit_bytes
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path)
        if text.isdigit() and int(text) < _UNLIMITED_BYTES:
            total = min(total, int(text))
    return int(total * MEMORY_SHARE)


def machine_id(settings: Settings) -> str:
    """What two workers on one machine have in common, in containers too: the kernel's boot id, unless it is set."""
    return settings.machine or _read("/proc/sys/kernel/random/boot_id") or settings.host_name


def _cpu_quota() -> float | None:
    """CPUs' worth of time that the cgroup gives, v2 then v1; None without a limit."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit():  # "max" or -1: no limit
        return None
    return int(quota) / int(period)


def _numa_nodes() -> list[list[int]]:
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return [parse_cpulist(_read(node / "cpulist")) for node in nodes]


def parse_cpulist(text: str) -> list[int]:
    """The kernel's list format: "0-3,8" is [0, 1, 2, 3, 8]."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def _first_sibling(core: int) -> int:
    siblings = parse_cpulist(_read(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
    return min(siblings, default=core)


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU"


def _cuda_devices(cores: list[int]) -> list[Device]:
    """Every visible GPU (or MIG instance) through NVML; none without a driver. Host cores are shared out evenly."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError as error:  # say, a driver that was updated under its feet
        log.warning("no GPU is used: NVML cannot be asked", error=str(error))
        return []
    try:
        found = gpus(pynvml)
    finally:
        pynvml.nvmlShutdown()
    return cuda_devices(found, cores, os.environ.get("CUDA_VISIBLE_DEVICES"))


def cuda_devices(found: list[dict[str, Any]], cores: list[int], visible: str | None) -> list[Device]:
    """The devices for what NVML `found`, of which CUDA_VISIBLE_DEVICES leaves those `visible` (None = all).

    A GPU has the same name whatever else is visible: leases on a machine are by name, and two workers there that were
    given different GPUs must not both call theirs cuda:0.
    """
    named = list(enumerate(found))
    if visible is not None:
        wanted = [word.strip() for word in visible.split(",") if word.strip()]
        named = [(number, gpu) for number, gpu in named if str(number) in wanted or _named(gpu["uuid"], wanted)]
    shares = len(named)
    return [
        Device(
            f"cuda:{number}",
            "cuda",
            tuple(cores[_edge(len(cores), index, shares) : _edge(len(cores), index + 1, shares)]) or tuple(cores),
            gpu["description"],
            gpu["uuid"],
            gpu["memory_bytes"],
        )
        for index, (number, gpu) in enumerate(named)
    ]


def _named(uuid: str, wanted: list[str]) -> bool:
    """CUDA_VISIBLE_DEVICES may hold UUIDs, or unique beginnings of them."""
    return any(len(word) > 4 and uuid.startswith(word) for word in wanted)


def gpus(nvml: Any) -> list[dict[str, Any]]:
    """What each GPU or MIG instance is; one that cannot be asked (it fell off the bus) is left out, and said so."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            instances = _mig_instances(nvml, handle)
            found += [_describe(nvml, each) for each in ([handle] if instances is None else instances)]
        except nvml.NVMLError as error:
            log.warning("a GPU is not used: NVML cannot tell what it is", index=index, error=str(error))
    return found


def gpu_holders(uuids: Sequence[str], pids: Collection[int]) -> list[int]:
    """Which of these processes still hold memory on these GPUs, as NVML tells; a driver gives it back a little late."""
    import pynvml

    held: set[int] = set()
    pynvml.nvmlInit()
    try:
        for uuid in uuids:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            held.update(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    finally:
        pynvml.nvmlShutdown()
    return sorted(held.intersection(pids))


def _mig_instances(pynvml: Any, handle: Any) -> list[Any] | None:
    """The parts that a card is split into; None where it is not split. One split into no parts runs nothing."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        return None  # not a card that can be split
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    instances = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instances.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except pynvml.NVMLError:
            continue  # a slot with no instance in it
    return instances


def _describe(pynvml: Any, handle: Any) -> dict[str, Any]:
    try:
        memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:  # a GPU that shares the host's memory
        memory_bytes = None
    size = "" if memory_bytes is None else f", {memory_bytes / 2**30:.0f} GiB"
    return {
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "description": f"{_text(pynvml.nvmlDeviceGetName(handle))}{size}",
        "memory_bytes": memory_bytes,
    }


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
