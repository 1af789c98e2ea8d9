"""What a folder lies on, and how large a scratch file may be there without filling it.

where = Filesystem.of(folder)          # type, source, space, limits
where.room_bytes                       # what may be taken: free space less a reserve, within RLIMIT_FSIZE
where.facts()                          # for the result's `environment`
"""

from __future__ import annotations

import os
import re
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESERVE_SHARE = 0.05
LEAST_RESERVE_BYTES = 256 << 20
MOST_RESERVE_BYTES = 1 << 30
IN_MEMORY = ("tmpfs", "ramfs")
"""Filesystems without a device. tmpfs takes O_DIRECT since Linux 6.6, and serves it from memory all the same."""


@dataclass(frozen=True)
class Filesystem:
    """The filesystem of one folder, as it is now."""

    folder: str
    type: str
    source: str
    total_bytes: int
    free_bytes: int
    """For whoever is not root; a project quota of ext4 or XFS counts."""
    file_limit_bytes: int | None
    """RLIMIT_FSIZE; None: no limit."""
    device: dict[str, Any]
    """Of the block device, where there is one: rotational, scheduler, logical_block_size."""

    @classmethod
    def of(cls, folder: Path) -> Filesystem:
        """Look it up."""
        space = os.statvfs(folder)
        kind, source = _mount_of(folder.resolve(), Path("/proc/self/mountinfo").read_text())
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return cls(
            folder=str(folder),
            type=kind,
            source=source,
            total_bytes=space.f_blocks * space.f_frsize,
            free_bytes=space.f_bavail * space.f_frsize,
            file_limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
            device=_block_device(folder.stat().st_dev),
        )

    @property
    def is_in_memory(self) -> bool:
        """Whether no device is behind it at all."""
        return self.type in IN_MEMORY

    @property
    def reserve_bytes(self) -> int:
        """What stays free: 5 % of the filesystem, at least 256 MiB, at most 1 GiB."""
        return int(min(MOST_RESERVE_BYTES, max(LEAST_RESERVE_BYTES, RESERVE_SHARE * self.total_bytes)))

    @property
    def room_bytes(self) -> int:
        """What a scratch file may take."""
        room = self.free_bytes - self.reserve_bytes
        return max(0, room if self.file_limit_bytes is None else min(room, self.file_limit_bytes))

    def why_no_room(self, wanted_bytes: int) -> str:
        """A sentence for whoever wanted so much and does not get it."""
        wanted = f"the storage probe needs {wanted_bytes / 1e6:.0f} MB in {self.folder}"
        if self.file_limit_bytes is not None and self.file_limit_bytes < wanted_bytes:
            return f"{wanted}, but files may only have {self.file_limit_bytes / 1e6:.0f} MB here (RLIMIT_FSIZE)"
        return (
            f"{wanted}, where {self.free_bytes / 1e6:.0f} MB of {self.total_bytes / 1e6:.0f} MB are free and "
            f"{self.reserve_bytes / 1e6:.0f} MB of them stay so: it would fill the disk"
        )

    def facts(self) -> dict[str, Any]:
        """Everything above, as a document."""
        return asdict(self)


def _mount_of(folder: Path, mountinfo: str) -> tuple[str, str]:
    """(type, source) of the mount that holds `folder`: the deepest one, of several at one place the last."""
    best, found = -1, ("unknown", "unknown")
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point = Path(_unescaped(left.split()[4]))
        depth = len(point.parts)
        if depth >= best and folder.is_relative_to(point):
            kind, source = right.split()[:2]
            best, found = depth, (kind, _unescaped(source))
    return found


def _unescaped(text: str) -> str:
    r"""mountinfo writes a space as \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _block_device(number: int) -> dict[str, Any]:
    """What sysfs tells of a block device; empty where the filesystem has none of its own (overlay, btrfs, network)."""
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    queue = next((path / "queue" for path in (device, device.resolve().parent) if (path / "queue").is_dir()), None)
    if queue is None:
        return {}
    told = {
        name: _read(queue / name)
        for name in ("rotational", "scheduler", "logical_block_size", "write_cache", "nr_requests")
    }
    return {"name": queue.resolve().parent.name, **{name: text for name, text in told.items() if text is not None}}


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
