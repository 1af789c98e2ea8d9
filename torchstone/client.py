"""The HTTP client: what a program or the command line says to a Torchstone service.

    with Client("http://127.0.0.1:8000") as client:
        job = client.submit({"kind": "jit", "model": {"preset": "mlp"}})
        job = client.wait(job["id"], on_progress=lambda job: print(job["progress"]))
        client.download(job["id"], "script.pt", Path("script.pt"))      # resumed and checked against its SHA-256

A problem document becomes the error class of its status (`torchstone.errors`): NotFound, Conflict, InvalidRequest with
its `errors` ... A service that cannot be reached is Unavailable. Jobs are plain dictionaries, as on the wire.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from torchstone import errors
from torchstone.jobs import is_terminal

Json = dict[str, Any]
Jsons = list[dict[str, Any]]
_LONG_POLL_S = 20.0
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 20
_DOWNLOAD_TRIES = 5
_BY_STATUS = {kind.status: kind for kind in errors.RequestError.__subclasses__()}


class Client:
    """Speaks to one service; use it as a context manager, or `close` it."""

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        self.url = url.rstrip("/")
        is_here = httpx.URL(self.url).host in ("127.0.0.1", "::1", "localhost")
        # A proxy that is set for the outside world does not reach this machine's own loopback.
        self._http = httpx.Client(base_url=self.url, timeout=timeout, transport=transport, trust_env=not is_here)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # -- jobs ---------------------------------------------------------------------------------------------------

    def submit(
        self, spec: Mapping[str, Any], *, wait_s: float | None = None, idempotency_key: str | None = None
    ) -> Json:
        """POST a spec; the job, finished where it finished within `wait_s`."""
        headers = {}
        if wait_s is not None:
            headers["Prefer"] = f"wait={wait_s:g}"
        if idempotency_key is not None:
            headers["Idempotency-Key"] = idempotency_key
        timeout_s = _READ_TIMEOUT_S + (wait_s or 0)
        return self._json("POST", "/v1/jobs", json=dict(spec), headers=headers, timeout=timeout_s)

    def check(self, spec: Mapping[str, Any]) -> Json:
        """What a spec would become: its defaults filled in, where it would run, warnings; nothing is stored."""
        return self._json("POST", "/v1/jobs", json=dict(spec), params={"validate_only": "true"})

    def job(self, job_id: str, *, wait_s: float | None = None) -> Json:
        """The job as it is now, or as soon as it is finished within `wait_s`."""
        params = {} if wait_s is None else {"wait": f"{wait_s:g}"}
        return self._json("GET", _job(job_id), params=params, timeout=_READ_TIMEOUT_S + (wait_s or 0))

    def wait(
        self,
        job_id: str,
        on_progress: Callable[[Json], None] | None = None,
        *,
        timeout_s: float | None = None,
        every_s: float = 0.25,
    ) -> Json:
        """The finished job. `on_progress` is called with the job about every `every_s` while it is not.

        Raises TimeoutError where it is not finished within `timeout_s`; the job itself runs on.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _LONG_POLL_S if deadline_s is None else deadline_s - time.monotonic()
            job = self.job(job_id, wait_s=max(0.0, min(left_s, _LONG_POLL_S if on_progress is None else every_s)))
            if on_progress is not None:
                on_progress(job)
            if is_terminal(job["state"]):
                return job
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutError(f"job {job_id} is {job['state']} after {timeout_s:g} s")

    def list(
        self,
        *,
        state: str | None = None,
        kind: str | None = None,
        label: str | None = None,
        limit: int | None = None,
    ) -> Iterator[Json]:
        """Jobs, newest first, at most `limit` of them; the pages are fetched as they are needed."""
        wanted = {"state": state, "kind": kind, "label": label}
        params: dict[str, str] = {name: value for name, value in wanted.items() if value is not None}
        left = limit
        while left is None or left > 0:
            if left is not None:
                params["limit"] = str(min(left, 100))
            page = self._json("GET", "/v1/jobs", params=params)
            yield from page["items"][:left]
            left = None if left is None else left - len(page["items"])
            if page["next_cursor"] is None:
                return
            params["cursor"] = page["next_cursor"]

    def cancel(self, job_id: str) -> Json:
        """Ask for the job's end. Raises Conflict where it has ended already."""
        return self._json("POST", _job(job_id, "/cancel"))

    def delete(self, job_id: str) -> None:
        """Delete a finished job and its files. Raises Conflict where it has not ended, Gone where it was deleted."""
        self._request("DELETE", _job(job_id))

    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[str]:
        """What the job printed so far, in pieces; with `follow` until its end."""
        params = {"follow": "true"} if follow else {}
        timeout = httpx.Timeout(_READ_TIMEOUT_S, read=None)  # a job may be silent for hours
        with (
            self._reaching(),
            self._http.stream("GET", _job(job_id, "/logs"), params=params, timeout=timeout) as response,
        ):
            if response.status_code >= 400:
                response.read()
                raise _problem(response)
            yield from response.iter_text()

    def result_text(self, job_id: str) -> str:
        """The finished job's table as plain text."""
        return self._text(_job(job_id, "/result.txt"))

    # -- inventory ----------------------------------------------------------------------------------------------

    def devices(self) -> Jsons:
        """Every host with its devices, and who holds them."""
        items: Jsons = self._json("GET", "/v1/devices")["items"]
        return items

    def kinds(self) -> Jsons:
        """Every kind of experiment with its schema and an example."""
        items: Jsons = self._json("GET", "/v1/kinds")["items"]
        return items

    # -- artifacts ----------------------------------------------------------------------------------------------

    def artifacts(self, job_id: str) -> Jsons:
        """The files that the job made: name, media_type, bytes, sha256."""
        items: Jsons = self._json("GET", _job(job_id, "/artifacts"))["items"]
        return items

    def download(self, job_id: str, name: str, path: Path) -> Path:
        """Fetch an artifact to `path`, which appears only whole and with the right SHA-256.

        What is there of it already lies in `path` + `.part` and is resumed, also after a broken connection.
        Raises NotFound for an unknown name, Unavailable where the bytes do not come or do not match.
        """
        listed = {item["name"]: item for item in self.artifacts(job_id)}
        if name not in listed:
            raise errors.NotFound(
                f"job {job_id} has no artifact {name!r}; it has: {', '.join(sorted(listed)) or 'none'}"
            )
        size, sha256 = int(listed[name]["bytes"]), str(listed[name]["sha256"])
        part = path.with_name(path.name + ".part")
        url = _job(job_id, f"/artifacts/{quote(name)}")
        for _ in range(_DOWNLOAD_TRIES):
            self._fetch_rest(url, part, size)
            if part.stat().st_size < size:
                continue
            if _sha256_of(part) == sha256:
                part.replace(path)
                return path
            part.unlink()  # what lay there was of something else: once more from the start
        raise errors.Unavailable(f"{name}: {_DOWNLOAD_TRIES} tries did not give {size} bytes with sha256 {sha256}")

    def _fetch_rest(self, url: str, part: Path, size: int) -> None:
        """Append what is missing; a broken connection leaves what came before it."""
        have = part.stat().st_size if part.exists() else 0
        if have > size:
            have = 0
        if have == size and have > 0:
            return
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            with self._http.stream("GET", url, headers=headers) as response:
                if response.status_code not in (200, 206):
                    response.read()
                    raise _problem(response)
                with part.open("ab" if response.status_code == 206 else "wb") as file:
                    for chunk in response.iter_raw(_CHUNK_BYTES):
                        file.write(chunk)
        except httpx.TransportError as error:
            if not part.exists() or part.stat().st_size <= have:
                raise errors.Unavailable(f"{self.url} broke off: {error}") from error

    # -- the wire -----------------------------------------------------------------------------------------------

    def _json(self, method: str, path: str, **options: Any) -> Json:
        body: Json = self._request(method, path, **options).json()
        return body

    def _text(self, path: str) -> str:
        return self._request("GET", path).text

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        with self._reaching():
            response = self._http.request(method, path, **options)
        if response.status_code >= 400:
            raise _problem(response)
        return response

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """What goes wrong below HTTP is Unavailable."""
        try:
            yield
        except httpx.ConnectError as error:
            raise errors.Unavailable(
                f"no Torchstone service answers at {self.url}: start one with `torchstone up`, "
                "or say where it is with --url or TORCHSTONE_URL"
            ) from error
        except httpx.TransportError as error:
            raise errors.Unavailable(f"{self.url}: {error or type(error).__name__}") from error


def _problem(response: httpx.Response) -> errors.RequestError:
    """The error that a problem document describes; any other body is quoted briefly."""
    try:
        body = response.json()
        if not isinstance(body, dict):
            raise ValueError
        detail = str(body.get("detail") or body.get("title") or response.reason_phrase)
        faults = [
            errors.FieldError(pointer=str(fault["pointer"]), detail=str(fault["detail"]))
            for fault in body.get("errors") or []
        ]
    except (ValueError, KeyError, TypeError):
        detail, faults = f"HTTP {response.status_code}: {response.text[:200]}", []
    headers = dict(response.headers)
    if response.status_code in (429, 503):
        after = headers.get("retry-after", "")
        return errors.Unavailable(detail, retry_after_s=int(after) if after.isdigit() else 2)
    kind = _BY_STATUS.get(response.status_code, errors.RequestError)
    return kind(detail, errors=faults, headers=headers)


def _job(job_id: str, rest: str = "") -> str:
    """The path of a job, or of something below it."""
    return f"/v1/jobs/{quote(job_id, safe='')}{rest}"


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
