"""Faults that people met in public, each as a small case with its right answer, through the HTTP interface."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.running import Running, running
from tests.torchstone.processes import wait_until
from torchstone.client import Client

pytestmark = pytest.mark.slow

NORMALISED = {
    "layers": [
        {"type": "Linear", "in_features": 8, "out_features": 16},
        {"type": "BatchNorm1d", "num_features": 16},
        {"type": "Dropout", "p": 0.5},
        {"type": "Linear", "in_features": 16, "out_features": 4},
    ],
    "input_shape": [8],
}
SQUARE_ROOT = {"layers": [{"type": "Sqrt"}], "input_shape": [2], "example_input": [1.0, -1.0]}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("cases") / "data") as up:
        yield up


@pytest.fixture(scope="module")
def client(up: Running) -> Iterator[Client]:
    with Client(up.url) as client:
        yield client


def run(client: Client, **spec: Any) -> dict[str, Any]:
    job = client.wait(client.submit({"kind": "jit", "budget_s": 1, **spec})["id"], timeout_s=100)
    assert job["state"] == "succeeded", job["error"]
    result: dict[str, Any] = job["result"]
    result["job_id"] = job["id"]
    return result


def row(rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    [found] = [r for r in rows if all(r.get(key) == value for key, value in fields.items())]
    return found


def test_exports_are_in_eval_mode(client: Client, tmp_path: Path) -> None:
    """pytorch#23999: a traced module kept dropping out, and normalised by its own batch."""
    result = run(client, model=NORMALISED, batch_sizes=[4])
    for variant in ("script", "trace"):
        check = row(result["checks"], name="equal_to_eager", of=variant)
        assert check["passed"] and check["max_abs_error"] <= 1e-5
    client.download(result["job_id"], "trace.pt", tmp_path / "trace.pt")
    code = """
import sys, warnings, torch
warnings.simplefilter("ignore")
model, x = torch.jit.load(sys.argv[1]), torch.randn(4, 8)
first, second, alone = model(x), model(x), model(x[:1])
assert torch.equal(first, second), "two calls differ"
torch.testing.assert_close(alone, first[:1], rtol=1e-5, atol=1e-6)
"""
    subprocess.run([sys.executable, "-I", "-c", code, str(tmp_path / "trace.pt")], check=True, cwd=tmp_path)


def test_nan_in_the_same_place_is_equal_and_counted(client: Client) -> None:
    """pytorch#143978: an equality check that a NaN fails, or one that a NaN always passes."""
    result = run(client, model=SQUARE_ROOT)
    for variant in ("script", "trace"):
        check = row(result["checks"], name="equal_to_eager", of=variant)
        assert check["passed"] and check["nan_count"] == 1
    raw = httpx.get(f"{client.url}/v1/jobs/{result['job_id']}/result.json").text

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(raw, parse_constant=refuse)


def test_first_calls_and_builds_are_no_part_of_the_steady_figure(client: Client) -> None:
    """pytorch#30902, #58801: warm-up counted as speed."""
    twenty = [layer for _ in range(20) for layer in ({"type": "Linear", "in_features": 32, "out_features": 32}, RELU)]
    result = run(
        client, model={"layers": twenty, "input_shape": [32]}, batch_sizes=[1, 3], variants=["eager", "script"]
    )
    for batch_size in (1, 3):
        timing = row(result["timings"], name="latency", of="script", at={"batch_size": batch_size})
        eager = row(result["timings"], name="latency", of="eager", at={"batch_size": batch_size})
        assert timing["first_call_s"] > timing["median"]
        assert timing["build_cold_s"] > timing["median"]
        speedup = row(result["comparisons"], name="latency", of="script", at={"batch_size": batch_size})["speedup"]
        assert speedup == pytest.approx(eager["median"] / timing["median"])


RELU = {"type": "ReLU"}


def test_threads_are_told_and_do_not_leak_into_the_next_job(client: Client) -> None:
    """pytorch#58585: a thread count set for one run still rules the next."""
    told = []
    for threads in (1, 2, None):
        result = run(client, model={"preset": "mlp"}, variants=["eager"], threads=threads, devices={"count": 2})
        [host] = result["environment"]["hosts"]
        told.append(host["torch"]["threads"])
    assert told == [1, 2, 2]


def test_every_statistic_recomputes_from_the_raw_samples(client: Client, tmp_path: Path) -> None:
    """pytorch#106801: statistics computed from one number."""
    import numpy as np

    result = run(client, model={"preset": "mlp"})
    client.download(result["job_id"], "samples.npz", tmp_path / "samples.npz")
    samples = np.load(io.BytesIO((tmp_path / "samples.npz").read_bytes()))
    latencies = [timing for timing in result["timings"] if timing["name"] == "latency"]
    assert len(latencies) == 3
    for timing in latencies:
        artifact, _, key = timing["samples"].partition("#")
        assert artifact == "samples.npz"
        raw = samples[key]
        expected = {
            "n": len(raw),
            "min": raw.min(),
            "median": np.median(raw),
            "mean": raw.mean(),
            "std": raw.std(ddof=1),
            "iqr": np.quantile(raw, 0.75) - np.quantile(raw, 0.25),
            "p10": np.quantile(raw, 0.10),
        }
        for name, value in expected.items():
            assert timing[name] == pytest.approx(value, rel=1e-9), name


def test_a_clients_retry_does_not_double_the_job(up: Running) -> None:
    spec = {"kind": "jit", "model": {"preset": "mlp"}, "variants": ["eager"], "calls": 10, "name": "once"}

    def post(key: str | None, **more: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        return httpx.post(f"{up.url}/v1/jobs", json={**spec, **more}, headers=headers, timeout=30)

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: post("ten at once"), range(10)))
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert all(answer.status_code in (200, 202) for answer in answers)
    assert post("ten at once", name="another body").status_code == 422
    assert post(None).json()["id"] != post(None).json()["id"]


@pytest.mark.parametrize("value", ["NaN", '"nan"', "1e999", "-Infinity"])
def test_no_number_but_a_finite_one_is_taken(up: Running, value: str) -> None:
    """fastapi#459: NaN travelled in, and could not travel out."""
    body = f'{{"kind": "train", "model": {{"preset": "mlp"}}, "optimizer": {{"name": "sgd", "lr": {value}}}}}'
    answer = httpx.post(f"{up.url}/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/optimizer/lr"]


def test_cancel_leaves_no_work_behind(up: Running, client: Client) -> None:
    """celery#5929: revoked, and still running."""
    spec = {"kind": "jit", "model": {"preset": "lenet"}, "calls": None, "ci_half_width": 1e-9, "budget_s": 600}
    job = client.submit(spec)
    wait_until(lambda: (client.job(job["id"])["progress"] or {}).get("done"), within_s=60)
    first = httpx.post(f"{up.url}/v1/jobs/{job['id']}/cancel")
    second = httpx.post(f"{up.url}/v1/jobs/{job['id']}/cancel")
    assert first.status_code == 202 and second.status_code in (202, 409)
    assert client.wait(job["id"], timeout_s=10)["state"] == "canceled"
    assert httpx.post(f"{up.url}/v1/jobs/{job['id']}/cancel").status_code == 409
    run(client, model={"preset": "mlp"}, variants=["eager"], calls=10)
    assert client.job(job["id"])["state"] == "canceled"


BAD = {
    "an unknown kind": ({"kind": "quantum"}, "/kind"),
    "an unknown field": ({"kind": "jit", "model": {"preset": "mlp"}, "lr": 0.1}, "/lr"),
    "a shape that does not fit": (
        {
            "kind": "jit",
            "model": {
                "layers": [
                    {"type": "Linear", "in_features": 512, "out_features": 256},
                    {"type": "Linear", "in_features": 128, "out_features": 2},
                ],
                "input_shape": [512],
            },
        },
        "/model/layers/1",
    ),
    "a negative count": ({"kind": "jit", "model": {"preset": "mlp"}, "calls": -5}, "/calls"),
    "more devices than any host has": (
        {"kind": "jit", "model": {"preset": "mlp"}, "devices": {"count": 99}},
        "/devices/count",
    ),
    "more memory than the host has": (
        {
            "kind": "jit",
            "model": {
                "layers": [{"type": "Linear", "in_features": 1_000_000, "out_features": 1_000_000}],
                "input_shape": [1_000_000],
            },
        },
        "/model",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_can_be_known_from_the_spec_is_refused_at_once(up: Running, what: str) -> None:
    spec, pointer = BAD[what]
    answer = httpx.post(f"{up.url}/v1/jobs", json=spec)
    assert answer.status_code == 422, answer.text
    assert any(error["pointer"].startswith(pointer) for error in answer.json()["errors"]), answer.text


def test_a_body_of_ten_megabytes_is_refused(up: Running) -> None:
    answer = httpx.post(f"{up.url}/v1/jobs", content=b'{"kind": "' + b"x" * 10_000_000 + b'"}')
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"
