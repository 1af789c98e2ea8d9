"""Every TORCHSTONE_* variable, in one frozen class, built by whoever starts a process.

    settings = Settings(data=Path("/srv/torchstone"))     # the rest from the environment, else defaults
    settings.database_url                                  # sqlite:////srv/torchstone/torchstone.db

Nothing reads the environment at import time.
"""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from torchstone.errors import SetupError

MAX_SOCKET_PATH_BYTES = 107  # sun_path on Linux, less its final NUL


class Settings(BaseSettings):
    """How one Torchstone process is configured. Every field is TORCHSTONE_<NAME> in the environment."""

    model_config = SettingsConfigDict(env_prefix="TORCHSTONE_", frozen=True, extra="ignore", allow_inf_nan=False)

    data: Path = Field(Path("torchstone-data"), description="Folder of the embedded database, broker and artifacts.")
    database_url: str = Field("", description="SQLAlchemy URL; default: SQLite in the data folder.")
    broker_url: str = Field("", description="Celery broker URL; default: the embedded Valkey's socket.")
    artifacts_url: str = Field("", description="file:///... or s3://bucket/prefix; default: the data folder.")
    broker_binary: str | None = Field(None, description="A valkey-server or redis-server to run as embedded broker.")

    host: str = Field("127.0.0.1", description="Address that the API listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port that the API listens on; 0 = any free one.")
    url: str = Field("", description="Where clients reach the API; default: http://host:port.")
    max_body_bytes: int = Field(1 << 20, ge=1024, description="Largest request body; above it 413.")
    max_wait_s: float = Field(60.0, gt=0, description="Longest `?wait=` or `Prefer: wait=`.")

    host_name: str = Field("", description="This worker host's name; default: the machine's.")
    machine: str = Field("", description="What workers on one machine have in common; default: the kernel's boot id.")
    devices: str = Field("", description="Comma list of devices this worker owns, e.g. cpu:0,cpu:1; default: all.")
    cpu_devices: int | None = Field(None, ge=1, description="Into how many CPU devices to split the usable cores.")
    memory_limit_bytes: int | None = Field(None, ge=1 << 28, description="Memory a job may take; default 80 % of host.")
    work: Path | None = Field(None, description="Scratch folder of running jobs; default: DATA/work.")

    lease_s: float = Field(30.0, gt=0, description="A running job whose worker is silent this long is taken back.")
    heartbeat_s: float = Field(5.0, gt=0, description="How often a worker renews its leases.")
    fence_s: float = Field(20.0, gt=0, description="A worker that could not renew for this long kills its jobs.")
    poll_s: float = Field(2.0, gt=0, description="How often an idle worker looks into the database by itself.")
    reconcile_s: float = Field(10.0, gt=0, description="How often lost jobs are looked for.")
    ring_again_s: float = Field(20.0, gt=0, description="A queued job gets another doorbell after this long.")
    max_attempts: int = Field(3, ge=1, description="Attempts before a job whose workers vanish is `worker_lost`.")
    kill_grace_s: float = Field(3.0, ge=0, description="Between SIGTERM and SIGKILL.")
    drain_s: float = Field(10.0, ge=0, description="How long a stopping worker lets its jobs run on.")
    checkpoint_s: float = Field(60.0, gt=0, description="A training saves itself at least this often, and each epoch.")
    log_limit_bytes: int = Field(4 << 20, ge=1024, description="Most of a job's output that is kept, per attempt.")

    keep_days: float | None = Field(None, ge=0, le=36500, description="Days for which a finished job is kept.")
    keep_artifact_bytes: int | None = Field(None, ge=0, description="Above it the oldest finished jobs are deleted.")
    keep_keys_days: float = Field(7.0, gt=0, le=36500, description="Days for which an Idempotency-Key is remembered.")
    collect_s: float = Field(60.0, gt=0, description="How often what need not be kept is looked for.")

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = Field("text", description="Log lines for people, or for a program.")
    diagnostics: bool = Field(False, description="Accept jobs of the kind `sleep`, which try Torchstone itself.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Derive what was not given from the data folder, so that one variable is enough."""
        try:
            data = Path(values.get("data") or "torchstone-data").expanduser().absolute()
        except RuntimeError as error:
            raise ValueError(f"the data folder {values['data']}: {error}") from None
        values["data"] = data
        for key in ("database_url", "broker_url", "artifacts_url", "url", "host_name", "work"):
            if values.get(key) in (None, ""):
                values.pop(key, None)
        values.setdefault("database_url", f"sqlite:///{data / 'torchstone.db'}")
        values.setdefault("broker_url", f"redis+socket://{_socket_path(data)}?virtual_host=0")
        values.setdefault("artifacts_url", (data / "artifacts").as_uri())
        values.setdefault("work", data / "work")
        values.setdefault("host_name", socket.gethostname())
        return values

    @field_validator("host_name")
    @classmethod
    def _host_name_names_a_folder(cls, name: str) -> str:
        """It does: that of this host's running jobs, below `work`, whose leftovers the worker removes."""
        if not name.isprintable() or "/" in name or name in (".", "..") or len(os.fsencode(name)) > 255:
            raise ValueError("must be a name of at most 255 bytes, without / and control characters")
        return name

    @model_validator(mode="after")
    def _leases_outlast_silence(self) -> Self:
        if not self.heartbeat_s < self.fence_s < self.lease_s:
            raise ValueError(
                "TORCHSTONE_HEARTBEAT_S < _FENCE_S < _LEASE_S must hold, or a job could run twice at once; "
                f"they are {self.heartbeat_s:g}, {self.fence_s:g} and {self.lease_s:g}"
            )
        return self

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Settings from the environment and what is `given`. Raises SetupError, naming each variable that is wrong."""
        try:
            return cls(**given)
        except ValidationError as error:
            faults = [
                f"TORCHSTONE_{str(e['loc'][0]).upper()}: {e['msg']}" if e["loc"] else e["msg"] for e in error.errors()
            ]
            raise SetupError("; ".join(fault.replace("Value error, ", "") for fault in faults)) from None

    @property
    def public_url(self) -> str:
        """The base URL that clients use, without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.url or f"http://{host}:{self.port}").rstrip("/")

    @property
    def stopped_within_s(self) -> float:
        """Within so long a stopping worker has ended its jobs or handed them back; then its supervisor kills it."""
        return self.drain_s + self.kill_grace_s + 15

    @property
    def datasets(self) -> Path:
        """The folder of data sets that were fetched."""
        return self.data / "datasets"

    @property
    def broker_socket(self) -> Path:
        """The unix socket of the embedded broker for this data folder."""
        return _socket_path(self.data)

    def environment(self) -> dict[str, str]:
        """These settings as TORCHSTONE_* variables, for a part started as another process."""
        dumped = self.model_dump(mode="json", exclude_none=True)
        return {f"TORCHSTONE_{name.upper()}": str(value) for name, value in dumped.items()}


def _socket_path(data: Path) -> Path:
    """DATA/broker.sock, or a short private folder where that is over the kernel's limit for socket paths."""
    path = data / "broker.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(data)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"torchstone-{os.getuid()}-{digest}" / "broker.sock"
