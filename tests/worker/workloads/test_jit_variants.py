"""Every variant of the `jit` experiment in one job; by itself, since what it waits for is compilers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.worker.fresh import run_fresh
from torchstone.specs import Variant


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_variant_runs_here_or_says_why_not(tmp_path: Path) -> None:
    model = {
        "layers": [
            {"type": "Conv2d", "in_channels": 1, "out_channels": 2, "kernel_size": 3},
            {"type": "BatchNorm2d", "num_features": 2},
            {"type": "ReLU"},
            {"type": "Flatten"},
            {"type": "Linear", "in_features": 72, "out_features": 3},
        ],
        "input_shape": [1, 8, 8],
    }
    variants = [variant.value for variant in Variant]
    spec = {"kind": "jit", "model": model, "variants": variants, "batch_sizes": [1, 4], "budget_s": 3.0}
    result, kept = (outcome := run_fresh(spec, tmp_path)).result, outcome.kept
    absent = {row.of: row.reason for row in result.skipped}
    assert absent.pop("cuda_graph") == "CUDA graphs need a CUDA device"
    if importlib.util.find_spec("onnxruntime") is None:
        assert "not installed" in absent.pop("onnxruntime")
    assert absent == {}
    present = {t.of for t in result.timings if t.name == "latency"}
    assert present == set(variants) - {row.of for row in result.skipped}
    assert [c for c in result.checks if not c.passed] == []
    for timing in result.timings:
        if timing.of.startswith("compile"):
            assert timing.build_cold_s is not None
            assert timing.build_warm_s is not None
            assert timing.build_warm_s < timing.build_cold_s
    for name in ("script.pt", "trace.pt", "script_frozen.pt", "trace_frozen.pt", "export_aot.pt2"):
        assert name in kept
        assert json.loads(kept[f"{name}.passport.json"].read_text())["check"]["passed"] is True
    assert not any("optimized" in name for name in kept)
    assert json.loads(kept["export_aot.pt2.passport.json"].read_text())["needs"]["isa"]
