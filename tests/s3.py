"""A real S3 server for tests: SeaweedFS, from the wheel of the development set; one key, one bucket.

    with s3_server(tmp_path) as s3:
        Blobs(s3.url)                       # with s3.environment in this process's or a child's

Its ports are free ones under 45000, since it listens at each plus 10000 as well.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.torchstone.processes import wait_until

BUCKET = "torchstone"
_PARTS = ("master", "volume", "filer", "s3")
_START_WITHIN_S = 60


@dataclass(frozen=True)
class S3:
    """A server that answers."""

    url: str
    environment: dict[str, str]
    """What the AWS SDKs and obstore read."""
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """A running server with an empty bucket; skips the test where SeaweedFS is not installed."""
    program = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if program is None:
        pytest.skip("SeaweedFS is not installed (no weed beside python or on PATH)")
    ports = dict(zip(_PARTS, _free_ports(len(_PARTS)), strict=True))
    key, secret = "torchstone-test", "".join(random.choices("abcdefghijkmnopqrstuvwxyz", k=20))
    identity = {"name": "test", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "weed").mkdir()
    command = [program, "server", "-s3", f"-dir={folder / 'weed'}", f"-s3.config={folder / 's3.json'}"]
    command += ["-ip=127.0.0.1", "-volume.max=20", "-master.volumeSizeLimitMB=64", "-s3.port.iceberg=0"]
    command += [f"-{part}.port={port}" for part, port in ports.items()]
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        bucket = f"http://127.0.0.1:{ports['filer']}/buckets/{BUCKET}/"
        wait_until(
            lambda: process.poll() is not None or _answers(bucket),
            _START_WITHIN_S,
            lambda: (folder / "weed.log").read_text()[-2000:],
        )
        endpoint = f"http://127.0.0.1:{ports['s3']}"
        wait_until(lambda: _is_there(endpoint), _START_WITHIN_S, lambda: (folder / "weed.log").read_text()[-2000:])
        yield S3(
            f"s3://{BUCKET}/artifacts",
            {
                "AWS_ENDPOINT": endpoint,
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": key,
                "AWS_SECRET_ACCESS_KEY": secret,
            },
            process,
        )
    finally:
        process.kill()
        process.wait(30)


def _answers(bucket: str) -> bool:
    """Whether the bucket could be made."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.post(bucket).status_code < 300
    return False


def _is_there(endpoint: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(endpoint).status_code < 500  # 403: it asks for the key
    return False


def _free_ports(count: int) -> list[int]:
    """Ports that are free, and so are those 10000 above them."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 44_000)
        if port not in found and _is_free(port) and _is_free(port + 10_000):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
