"""What cannot run on a type of device is known from the spec, and told in the same words before and after."""

from __future__ import annotations

from typing import Any

import pytest

from torchstone.fitness import cautions, unfit
from torchstone.specs import Variant, parse_spec
from torchstone.training import Strategy

MLP = {"model": {"preset": "mlp"}}
ONE = {"layers": [{"type": "Linear", "in_features": 64, "out_features": 10}], "input_shape": [64]}


def jit(**fields: Any) -> Any:
    return parse_spec({"kind": "jit", **MLP, "variants": [variant.value for variant in Variant], **fields})


def test_inference_on_a_gpu_rules_nothing_out_and_a_cpu_only_graphs_of_the_gpu() -> None:
    assert unfit(jit(), "cuda") == {} == unfit(jit(variants=["eager"], grad=True), "cpu")
    assert unfit(jit(), "cpu") == {"cuda_graph": "CUDA graphs need a CUDA device"}
    assert set(unfit(jit(dtype="bfloat16"), "cuda")) == {"onnxruntime"}


def test_forms_without_gradients_have_no_training_step() -> None:
    absent = unfit(jit(grad=True), "cuda")
    frozen = {f"{way}_{how}" for way in ("script", "trace") for how in ("frozen", "optimized")}
    assert set(absent) == frozen | {"export_aot", "onnxruntime", "cuda_graph"}


@pytest.mark.parametrize(
    ("spec", "device_type", "names"),
    [
        ({"kind": "train", **MLP, "strategies": [s.value for s in Strategy]}, "cpu", ["replicate"]),
        ({"kind": "train", **MLP, "strategies": [s.value for s in Strategy]}, "cuda", []),
        (
            {"kind": "train", "model": ONE, "strategies": ["pipeline", "ddp"], "devices": {"count": 2}},
            "cpu",
            ["pipeline"],
        ),
        ({"kind": "hardware"}, "cpu", ["host_device", "device_device"]),
        ({"kind": "hardware"}, "cuda", []),
        ({"kind": "hardware", "probes": ["collectives", "memory"], "isolation": "device"}, "cpu", ["collectives"]),
        ({"kind": "hardware", "isolation": "device", "devices": {"count": 2}}, "cuda", []),
        ({"kind": "async"}, "cpu", []),
        ({"kind": "parallel"}, "cpu", []),
    ],
)
def test_each_kind_names_its_own(spec: dict[str, Any], device_type: str, names: list[str]) -> None:
    assert list(unfit(parse_spec(spec), device_type)) == names


def test_a_job_that_can_only_fail_is_told_so() -> None:
    graph = jit(variants=["cuda_graph", "eager"], baseline="cuda_graph")
    assert cautions(graph, "cpu")[1:] == ["the job will fail: its baseline cuda_graph cannot run"]
    alone = parse_spec({"kind": "train", **MLP, "strategies": ["replicate"]})
    assert cautions(alone, "cpu")[1:] == ["nothing of it can run on cpu devices"]
    assert cautions(alone, "cuda") == []


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"batch_size": 1}, "of 2 devices 1 would have no sample: batch_size is 1"),
        (
            {"batch_size": 3},
            "a device would have one sample at a time, of which BatchNorm1d has no statistics: batch_size is 3",
        ),
        ({"batch_size": 3, "batch_norm": "synchronized"}, None),
        ({"batch_size": 1, "scaling": ["weak"]}, None),
        ({"batch_size": 1, "strategies": ["single"]}, None),
        ({"batch_size": 4}, None),
    ],
)
def test_shares_that_are_too_small_are_told(fields: dict[str, Any], told: str | None) -> None:
    layers = [{"type": "Flatten"}, {"type": "BatchNorm1d", "num_features": 64}]
    layers.append({"type": "Linear", "in_features": 64, "out_features": 10})
    model = {"layers": layers, "input_shape": [1, 8, 8]}
    spec = {"kind": "train", "model": model, "devices": {"count": 2}, **fields}
    assert cautions(parse_spec(spec), "cpu") == ([told] if told else [])


def test_a_time_limit_shorter_than_the_budget_is_told() -> None:
    (told,) = cautions(jit(variants=["eager"], timeout_s=5), "cpu")
    assert told == "timeout_s, 5, would end it before budget_s, 20, is used up"
    assert cautions(jit(variants=["eager"], timeout_s=21), "cpu") == []
