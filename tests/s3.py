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
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.torchstone.processes import wait_until

BUCKET = "torchstone"
_PARTS = ("master", "volume", "filer", "s3")
_START_WITHIN_S = 60


@dataclass
class S3:
    """A server that can be stopped and started."""

    url: str
    environment: dict[str, str]
    """What the AWS tools and obstore read."""
    _command: list[str]
    _folder: Path
    _bucket: str
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it (again) and wait until it answers."""
        with (self._folder / "weed.log").open("ab") as log:
            self._process = process = subprocess.Popen(self._command, cwd=self._folder, stdout=log, stderr=log)
        for answers in (partial(_is_made, self._bucket), partial(_is_there, self.environment["AWS_ENDPOINT"])):
            wait_until(lambda answers=answers: process.poll() is not None or answers(), _START_WITHIN_S, self._log)
        assert process.poll() is None, self._log()

    def stop(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def _log(self) -> str:
        return (self._folder / "weed.log").read_text()[-2000:]


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """A running server with an empty bucket; skips the test on systems that it does not come for."""
    program = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if program is None:
        assert sys.platform != "linux", "there is no weed beside python or on PATH: make setup installs it"
        pytest.skip("SeaweedFS comes with the development set on Linux alone")
    ports = dict(zip(_PARTS, _free_ports(len(_PARTS)), strict=True))
    key, secret = "torchstone-test", "".join(random.choices("abcdefghijkmnopqrstuvwxyz", k=20))
    identity = {"name": "test", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "weed").mkdir()
    command = [program, "server", "-s3", f"-dir={folder / 'weed'}", f"-s3.config={folder / 's3.json'}"]
    command += ["-ip=127.0.0.1", "-volume.max=20", "-master.volumeSizeLimitMB=64", "-s3.port.iceberg=0"]
    command += [f"-{part}.port={port}" for part, port in ports.items()]
    environment = {
        "AWS_ENDPOINT": f"http://127.0.0.1:{ports['s3']}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
    }
    bucket = f"http://127.0.0.1:{ports['filer']}/buckets/{BUCKET}/"
    server = S3(f"s3://{BUCKET}/artifacts", environment, command, folder, bucket)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _is_made(bucket: str) -> bool:
    """Whether the bucket is there, or could be made."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.post(bucket).status_code in (200, 201, 409)  # 409: it is there already
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
