"""Jobs as the service sends them, with every section of a Result filled: what render and the client are tested on."""

from __future__ import annotations

import json
from typing import Any

from torchstone.results import (
    Artifact,
    Check,
    Code,
    Comparison,
    Curve,
    Figure,
    Quality,
    Result,
    Skipped,
    Span,
    Table,
    Timing,
)

ID = "01938c5e-7b2c-7d11-8a3f-2f6f0a7d5c11"


def timing(of: str, median_s: float, batch_size: int = 1, **more: Any) -> Timing:
    spread = {"min": 0.9, "p05": 0.92, "p10": 0.95, "p90": 1.1, "p95": 1.2, "mean": 1.01}
    given = {name: factor * median_s for name, factor in spread.items()}
    return Timing(
        name="latency",
        of=of,
        at={"batch_size": batch_size},
        n=240,
        median=median_s,
        std=0.05 * median_s,
        iqr=0.08 * median_s,
        ci95=(0.99 * median_s, 1.01 * median_s),
        first_call_s=2.5e-3,
        samples=f"samples.npz#{of}/{batch_size}",
        **{**given, **more},
    )


def full_result() -> Result:
    return Result(
        timings=[timing("eager", 20e-6), timing("script", 15e-6), timing("eager", 40e-6, 8), timing("trace", 9e-6)],
        comparisons=[
            Comparison(
                name="latency",
                of="script",
                against="eager",
                at={"batch_size": 1},
                speedup=1.3333,
                ci95=(1.3, 1.36),
                noise_floor=0.004,
                verdict="faster",
            ),
            Comparison(
                name="latency",
                of="trace",
                against="eager",
                at={"batch_size": 1},
                speedup=None,
                ci95=None,
                noise_floor=0.004,
                verdict="withheld",
                reason="its output differs",
            ),
            Comparison(
                name="scaling",
                of="ddp",
                against="single",
                speedup=1.9,
                ci95=(1.8, 2.0),
                noise_floor=None,
                verdict="faster",
            ),
        ],
        checks=[
            Check(name="equal_to_eager", of="script", against="eager", passed=True, max_abs_error=0.0, bitwise=True),
            Check(
                name="equal_to_eager",
                of="trace",
                against="eager",
                at={"batch_size": 1},
                passed=False,
                rtol=1e-4,
                atol=1e-5,
                max_abs_error=0.5,
                max_rel_error=2.0,
                nan_count=3,
                detail="one-sided NaN",
            ),
            Check(name="replicas_equal", of="ddp", against="rank 0", passed=True, max_abs_error=0.0),
        ],
        curves=[
            Curve(
                name="test_accuracy",
                of="ddp",
                x_name="epoch",
                y_name="accuracy",
                x=[1, 2, 3],
                y=[0.5, None, 0.9],
                ci95=[(0.4, 0.6), None, None],
            )
        ],
        figures=[
            Figure(name="bandwidth", of="memory", value=12.5e9, unit="B/s", bytes=1 << 30, method="copy"),
            Figure(name="overlap", of="streams", value=None, unit="1", reason="one device only"),
        ],
        spans=[Span(name="compute", of="concurrent", at={"devices": 2, "rank": 0}, start_s=0.0, end_s=0.47)],
        tables=[Table(name="graph", columns=["op", "calls"], rows=[["aten::mm, in place", 3], ["aten::relu", None]])],
        artifacts=[Artifact(name="script.pt", media_type="application/octet-stream", bytes=662_104, sha256="ab" * 32)],
        skipped=[Skipped(of="cuda_graph", reason="this host has no CUDA device")],
        environment={
            "hosts": [
                {
                    "cpu_model": "Example CPU @ 2.4 GHz",
                    "cpu_count": 4,
                    "cores": [0, 1],
                    "memory_bytes": 16_000_000_000,
                    "system": "Linux-6.1",
                    "python": "3.11.7",
                    "libraries": {"torch": "2.13.0", "numpy": "2.4.6", "torchstone": "0.1.0"},
                    "torch": {"threads": 2, "grad": False},
                }
            ]
        },
        quality=Quality(
            grade="suspect",
            codes=[
                Code(
                    code="noise_floor",
                    severity="warning",
                    evidence={"at": {"batch_size": 1}, "noise_floor": 0.031234, "asked": 0.01},
                )
            ],
        ),
        noise_floor=0.031234,
    )


def job(state: str = "succeeded", result: Result | None = None, **more: Any) -> dict[str, Any]:
    """A job as decoded JSON; `more` replaces fields."""
    attempt = {"number": 1, "host": "a", "devices": ["cpu:0"], "started_at": "2026-11-29T20:03:14.000000Z"}
    return {
        "id": ID,
        "kind": "jit",
        "name": "my first run",
        "labels": {"team": "vision"},
        "state": state,
        "owner": None,
        "spec_version": 1,
        "spec": {"kind": "jit"},
        "created_at": "2026-11-29T20:03:13.123456Z",
        "started_at": None if state == "queued" else "2026-11-29T20:03:14.000000Z",
        "finished_at": "2026-11-29T20:03:20.000000Z" if state in ("succeeded", "failed") else None,
        "progress": None,
        "waiting_for": None,
        "attempts": [] if state == "queued" else [attempt],
        "error": None,
        "result": None if result is None else json.loads(result.to_json()),
        "links": {"self": f"/v1/jobs/{ID}"},
        **more,
    }
