"""Downloads: whole, in part, resumed, cached, and never more than asked for."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

from tests.service.conftest import Service
from tests.torchstone.store_samples import claim, up
from torchstone.client import Client
from torchstone.jobs import State
from torchstone.store import leases

CONTENT = bytes(range(256)) * 10_000  # over two pieces of a stream
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def finished(service: Service, files: dict[str, bytes]) -> str:
    """The id of a job that made these files."""
    job_id: str = service.submit()["id"]
    service.finish(claim(service.store, up(service.store)), files=files)
    return job_id


@pytest.fixture
def path(service: Service) -> str:
    return f"/v1/jobs/{finished(service, {'script.pt': CONTENT})}/artifacts/script.pt"


def test_the_list_names_them_and_their_links_lead_to_them(service: Service) -> None:
    job_id = finished(service, {"script.pt": CONTENT, "a b/ü%.txt": b"x", "empty": b""})
    listed = service.http.get(f"/v1/jobs/{job_id}/artifacts").json()
    assert [item["name"] for item in listed["items"]] == ["a b/ü%.txt", "empty", "script.pt"]
    assert listed["items"][2] | {"created_at": ""} == {
        "name": "script.pt",
        "media_type": "application/octet-stream",
        "bytes": len(CONTENT),
        "sha256": SHA256,
        "created_at": "",
        "href": f"/v1/jobs/{job_id}/artifacts/script.pt",
    }
    assert [service.http.get(item["href"]).content for item in listed["items"]] == [b"x", b"", CONTENT]
    assert service.http.get(f"/v1/jobs/{service.submit()['id']}/artifacts").json()["items"] == []


def test_a_download_says_what_it_is(service: Service, path: str) -> None:
    for answer in (service.http.get(path), service.http.head(path)):
        assert answer.status_code == 200
        assert answer.headers["content-length"] == str(len(CONTENT)) and answer.headers["accept-ranges"] == "bytes"
        assert answer.headers["etag"] == f'"{SHA256}"'
        digest = base64.b64encode(bytes.fromhex(SHA256)).decode()
        assert answer.headers["repr-digest"] == f"sha-256=:{digest}:"
        assert answer.headers["content-disposition"].startswith('attachment; filename="script.pt"')
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert service.http.get(path).content == CONTENT and service.http.head(path).content == b""


@pytest.mark.parametrize(
    ("header", "begin", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-199", 100, 200),
        ("bytes=2559000-", 2_559_000, len(CONTENT)),
        ("bytes=1048000-1049000", 1_048_000, 1_049_001),
        ("bytes=5-99999999999", 5, len(CONTENT)),
        ("bytes=-7", len(CONTENT) - 7, len(CONTENT)),
        ("bytes=-99999999999", 0, len(CONTENT)),
    ],
)
def test_a_range_is_answered_with_just_it(service: Service, path: str, header: str, begin: int, end: int) -> None:
    answer = service.http.get(path, headers={"Range": header})
    assert answer.status_code == 206
    assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/{len(CONTENT)}"
    assert answer.headers["content-length"] == str(end - begin)
    assert answer.content == CONTENT[begin:end]
    whole = service.http.head(path, headers={"Range": header})  # a range is a matter of GET alone
    assert (whole.status_code, whole.headers["content-length"]) == (200, str(len(CONTENT)))


@pytest.mark.parametrize("header", ["bytes=2560000-", "bytes=9999999999-9999999999", "bytes=-0"])
def test_a_range_beyond_the_end_is_not_satisfiable(service: Service, path: str, header: str) -> None:
    answer = service.http.get(path, headers={"Range": header})
    assert answer.status_code == 416 and answer.headers["content-range"] == f"bytes */{len(CONTENT)}"
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("header", ["bytes=1-2,4-5", "bytes=5-4", "bytes=-", "bytes=a-b", "lines=1-2", "", "bytes=1"])
def test_other_ranges_get_the_whole_file(service: Service, path: str, header: str) -> None:
    answer = service.http.get(path, headers={"Range": header})
    assert answer.status_code == 200 and answer.content == CONTENT


def test_conditions(service: Service, path: str) -> None:
    etag = f'"{SHA256}"'
    for tag in (etag, f'"x", W/{etag}', "*"):
        cached = service.http.get(path, headers={"If-None-Match": tag})
        assert cached.status_code == 304 and cached.content == b"" and cached.headers["etag"] == etag
    assert service.http.get(path, headers={"If-None-Match": '"x"'}).status_code == 200
    part = {"Range": "bytes=0-9"}
    assert service.http.get(path, headers={**part, "If-Range": etag}).status_code == 206
    for other in ('"x"', f"W/{etag}", "Sun, 29 Nov 2026 20:03:13 GMT"):
        assert service.http.get(path, headers={**part, "If-Range": other}).status_code == 200


def test_a_file_of_no_bytes(service: Service) -> None:
    path = f"/v1/jobs/{finished(service, {'empty': b''})}/artifacts/empty"
    answer = service.http.get(path)
    assert answer.status_code == 200 and answer.headers["content-length"] == "0"
    assert service.http.get(path, headers={"Range": "bytes=0-"}).status_code == 416


@pytest.mark.parametrize("name", ["nope", "..%2F..%2Fetc%2Fpasswd", "%00", "x" * 3000])
def test_no_other_name_is_served(service: Service, path: str, name: str) -> None:
    answer = service.http.get(path.replace("script.pt", name))
    assert answer.status_code == 404 and answer.headers["content-type"] == "application/problem+json"


def test_a_name_is_offered_in_both_spellings(service: Service) -> None:
    job_id = finished(service, {'dir/ü "1".pt': b"x"})
    href = service.http.get(f"/v1/jobs/{job_id}/artifacts").json()["items"][0]["href"]
    header = service.http.get(href).headers["content-disposition"]
    assert header == "attachment; filename=\"_ _1_.pt\"; filename*=UTF-8''%C3%BC%20%221%22.pt"


def test_lost_bytes_are_gone_not_an_error(service: Service, path: str) -> None:
    service.blobs.delete(SHA256)
    assert service.http.get(path).status_code == 410
    assert service.http.get("/healthz").status_code == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_resumes_what_broke_off(service: Service, path: str, tmp_path: Path) -> None:
    target = tmp_path / "script.pt"
    target.write_bytes(CONTENT[:1_000_000])
    url = f"{service.http.base_url}{path}"
    subprocess.run(["curl", "-sS", "--fail", "-C", "-", "-o", target, url], check=True, timeout=30)
    assert target.read_bytes() == CONTENT


def test_our_own_client_downloads_and_checks(service: Service, path: str, tmp_path: Path) -> None:
    job_id = path.split("/")[3]
    (tmp_path / "script.pt.part").write_bytes(CONTENT[:1_000])
    with Client(str(service.http.base_url)) as client:
        assert client.download(job_id, "script.pt", tmp_path / "script.pt").read_bytes() == CONTENT


def test_a_large_file_is_never_whole_in_memory(service: Service) -> None:
    size = 256 << 20
    source = service.scratch / "large"
    with source.open("wb") as file:
        file.truncate(size)
    sha256, _ = service.blobs.put(source)
    job_id = service.submit()["id"]
    claimed = claim(service.store, up(service.store))
    row = {"name": "large", "media_type": "application/octet-stream", "bytes": size, "sha256": sha256}
    with service.store.write() as conn:
        leases.finish(conn, claimed.holder, State.succeeded, files=[row])
    process, received, most = psutil.Process(), 0, 0
    before = process.memory_info().rss
    with service.http.stream("GET", f"/v1/jobs/{job_id}/artifacts/large") as answer:
        for chunk in answer.iter_raw(1 << 20):
            received += len(chunk)
            most = max(most, process.memory_info().rss)
    assert received == size
    assert most - before < 100 << 20


def test_a_client_that_breaks_off_does_no_harm(service: Service, path: str) -> None:
    with service.http.stream("GET", path) as answer:
        next(answer.iter_raw(10))
    with pytest.raises(httpx.ReadTimeout):
        service.http.get(f"/v1/jobs/{service.submit()['id']}", params={"wait": "9"}, timeout=0.2)
    assert service.http.get(path).content == CONTENT
