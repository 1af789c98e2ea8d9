"""The networks that specs can name, against the real thing: every shape and count from the contract equals torch's."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.worker.layer_samples import SAMPLES
from torchstone.errors import InvalidModel, OutOfMemory
from torchstone.facts import facts, steps_of
from torchstone.layers import LAYERS, parse_layer
from torchstone.models import LayersModel, PresetModel
from worker.models import build, inputs
from worker.models.layers import OWN, sequential

PRESETS = ("mlp", "lenet", "resnet18", "transformer")


@contextlib.contextmanager
def torchscript() -> Iterator[None]:
    """TorchScript called on purpose: it is deprecated, and says so at every step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield


def layers(*bodies: dict[str, Any], shape: list[int], **more: Any) -> LayersModel:
    return LayersModel.model_validate({"layers": list(bodies), "input_shape": shape, **more})


# The table against torch ----------------------------------------------------------------------------------------


def test_every_layer_type_has_samples() -> None:
    assert set(SAMPLES) == set(LAYERS)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", LAYERS)
def test_shapes_and_counts_equal_torch(name: str) -> None:
    seen = []

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(SAMPLES[name], st.integers(2, 3))
    def check(sample: tuple[dict[str, Any], list[int]], batch_size: int) -> None:
        arguments, shape = sample
        model = layers({"type": name, **arguments}, shape=shape)
        known = facts(model)
        module = build(model, seed=0)
        x = inputs(model, batch_size, seed=0)
        assert sum(parameter.numel() for parameter in module.parameters()) == known.parameters
        for mode in (module.train(), module.eval()):
            assert mode(*x).shape == (batch_size, *known.output_shape)
        seen.append(known)

    check()
    assert seen


@pytest.mark.parametrize("name", sorted(set(LAYERS) - set(OWN)))
def test_arguments_have_torchs_names_and_defaults(name: str) -> None:
    left_out = {"self", "args", "kwargs", "device", "dtype", "return_indices"}
    left_out |= {"recompute_scale_factor"}  # changes how Upsample interpolates, not what it is
    left_out |= {"min_value", "max_value"}  # Hardtanh's deprecated names
    if name == "Embedding":
        left_out |= {"max_norm", "norm_type", "scale_grad_by_freq", "sparse", "_weight", "_freeze"}
    theirs = {
        key: parameter.default
        for key, parameter in inspect.signature(getattr(nn, name).__init__).parameters.items()
        if key not in left_out
    }
    if name == "TransformerEncoderLayer":
        assert theirs["activation"] is nn.functional.relu
        theirs["activation"] = "relu"
    fields = LAYERS[name].arguments.model_fields
    ours = {
        key: inspect.Parameter.empty if field.is_required() else field.default
        for key, field in fields.items()
        if key != "type"
    }
    assert ours == theirs


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ({"type": "Conv2d", "in_channels": 1, "out_channels": 1, "kernel_size": 5}, (1, 4, 9)),
        ({"type": "Conv1d", "in_channels": 1, "out_channels": 1, "kernel_size": 3, "dilation": 4}, (1, 8)),
        (
            {
                "type": "Conv1d",
                "in_channels": 1,
                "out_channels": 1,
                "kernel_size": 3,
                "padding": 4,
                "padding_mode": "reflect",
            },
            (1, 4),
        ),
        ({"type": "ConvTranspose1d", "in_channels": 1, "out_channels": 1, "kernel_size": 2, "padding": 1}, (1, 1)),
        ({"type": "MaxPool2d", "kernel_size": 3}, (1, 2, 9)),
        ({"type": "AvgPool1d", "kernel_size": 3}, (1, 2)),
        ({"type": "Unflatten", "dim": 1, "unflattened_size": [2, -1]}, (5,)),
        ({"type": "GLU"}, (3,)),
        ({"type": "PixelShuffle", "upscale_factor": 2}, (6, 2, 2)),
        ({"type": "GroupNorm", "num_groups": 2, "num_channels": 2}, (2,)),
        ({"type": "InstanceNorm1d", "num_features": 2}, (2, 1)),
        ({"type": "LayerNorm", "normalized_shape": [2, 3]}, (2, 4)),
        ({"type": "ZeroPad2d", "padding": [0, 0, 2, -2]}, (1, 1, 1)),
        ({"type": "PReLU", "num_parameters": 3}, (2, 4)),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_what_is_refused_torch_refuses_too(body: dict[str, Any], shape: tuple[int, ...]) -> None:
    layer = parse_layer(body)
    with pytest.raises(ValueError):
        LAYERS[layer.type].shape(layer, shape)
    with pytest.raises((RuntimeError, ValueError)):
        sequential([layer])(torch.randn(1, *shape))


# Presets --------------------------------------------------------------------------------------------------------


COUNTS = {"mlp": 164_482, "lenet": 129_068, "resnet18": 11_175_818, "transformer": 69_578}


@pytest.mark.parametrize(("preset", "count"), COUNTS.items())
def test_presets_have_their_parameters_and_shapes(preset: str, count: int) -> None:
    model = PresetModel.model_validate({"preset": preset})
    module = build(model, seed=0)
    known = facts(model)
    assert sum(parameter.numel() for parameter in module.parameters()) == known.parameters == count
    assert module(*inputs(model, 3, seed=0)).shape == (3, *known.output_shape)


@pytest.mark.parametrize(
    "body",
    [
        {"preset": "mlp", "input_shape": [1, 8, 8], "classes": 10},
        {"preset": "mlp", "input_shape": [3]},
        {"preset": "lenet", "input_shape": [3, 32, 20], "classes": 4},
        {"preset": "lenet", "input_shape": [1, 14, 14]},
        {"preset": "resnet18", "input_shape": [3, 9, 1], "classes": 100},
        {"preset": "transformer", "input_shape": [3, 5, 7], "classes": 1},
        {"preset": "transformer", "input_shape": [6, 4]},
    ],
    ids=str,
)
def test_presets_take_other_shapes_and_classes(body: dict[str, Any]) -> None:
    model = PresetModel.model_validate(body)
    module = build(model, seed=0)
    known = facts(model)
    assert known.input_shape == model.shape and known.output_shape == (model.outputs,)
    assert sum(parameter.numel() for parameter in module.parameters()) == known.parameters
    assert module(*inputs(model, 3, seed=0)).shape == (3, model.outputs)


def test_the_transformer_reads_rows_in_their_order() -> None:
    module = build(PresetModel(preset="transformer", input_shape=[2, 5, 7]), seed=0)
    x = torch.randn(1, 2, 5, 7)
    tokens = build(PresetModel(preset="transformer", input_shape=[5, 14]), seed=0)
    torch.testing.assert_close(module(x), tokens(torch.cat([x[:, 0], x[:, 1]], dim=2)))
    assert not torch.allclose(module(x), module(x.flip(2)), atol=1e-3)  # positions tell the rows apart


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_facts_follow_the_real_modules_layer_by_layer(preset: str) -> None:
    model = PresetModel.model_validate({"preset": preset})
    module = build(model, seed=0).eval()
    seen: list[tuple[str, tuple[int, ...]]] = []
    for part in module.modules():
        if not list(part.children()):
            part.register_forward_hook(lambda part, _, y: seen.append((type(part).__name__, tuple(y.shape[1:]))))
    module(*inputs(model, 1, seed=0))
    by_contract = [(step.layer.type, step.output_shape) for step in steps_of(model)]
    seen = [entry for entry in seen if entry[0] != "MeanToken"]  # no layer of torch's
    if preset == "resnet18":  # its blocks call torch.relu, and shortcuts that change nothing are no steps
        seen = [entry for entry in seen if entry[0] not in ("ReLU", "Identity")]
        by_contract = [entry for entry in by_contract if entry[0] != "ReLU"]
    assert by_contract == seen


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_scripted_and_traced(preset: str) -> None:
    model = PresetModel.model_validate({"preset": preset, "init": "default"})
    module = build(model, seed=0).eval()
    x = inputs(model, 2, seed=0)
    other = inputs(model, 3, seed=1)
    with torch.no_grad(), torchscript():
        for program in (torch.jit.script(module), torch.jit.trace(module, x)):
            for batch in (x, other):
                torch.testing.assert_close(program(*batch), module(*batch))


# Weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_seed_repeats_weights_and_inputs_and_another_differs(preset: str) -> None:
    model = PresetModel.model_validate({"preset": preset})
    once, again, other = (build(model, seed) for seed in (1, 1, 2))
    for name, weight in once.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(next(once.parameters()), next(other.parameters()))
    assert torch.equal(inputs(model, 2, 1)[0], inputs(model, 2, 1)[0])
    assert not torch.equal(inputs(model, 2, 1)[0], inputs(model, 2, 2)[0])


def test_building_leaves_the_random_state_as_it_was() -> None:
    before = torch.get_rng_state()
    model = PresetModel(preset="lenet")
    build(model, seed=3)
    inputs(model, 2, seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_zero_weights_answer_zero() -> None:
    for preset in PRESETS:
        model = PresetModel.model_validate({"preset": preset, "init": "zeros"})
        module = build(model, seed=0)
        assert not any(parameter.any() for parameter in module.parameters())
        assert not module(*inputs(model, 2, seed=0)).any()


def test_fixture_r_of_the_cases_takes_the_right_step() -> None:
    """Rows 1..10, all of class 0, one step of SGD at lr 0.2 on a zero layer: +0.55 and -0.55."""
    linear = {"type": "Linear", "in_features": 1, "out_features": 2, "bias": False}
    module = build(layers(linear, shape=[1], init="zeros"), seed=0)
    (weight,) = module.parameters()
    loss = nn.functional.cross_entropy(module(torch.arange(1.0, 11.0)[:, None]), torch.zeros(10, dtype=torch.int64))
    loss.backward()
    assert weight.grad is not None
    torch.testing.assert_close(-0.2 * weight.grad, torch.tensor([[0.55], [-0.55]]))


def test_normal_weights_are_the_chapters() -> None:
    module = build(PresetModel(preset="resnet18"), seed=0)
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            assert part.bias is not None and not part.bias.any()
            if part.weight.numel() > 10_000:
                assert part.weight.std().item() == pytest.approx(0.01, rel=0.05)
        elif isinstance(part, nn.BatchNorm2d):
            assert torch.equal(part.weight, torch.ones_like(part.weight))


def test_normal_weights_reach_attention_and_spare_the_padding_row() -> None:
    encoder = {"type": "TransformerEncoderLayer", "d_model": 64, "nhead": 2, "batch_first": True}
    embedding = {"type": "Embedding", "num_embeddings": 5, "embedding_dim": 64, "padding_idx": 1}
    module = build(layers(embedding, encoder, shape=[3], init="normal"), seed=0)
    assert isinstance(module, nn.Sequential)
    weights = dict(module.named_parameters())
    assert weights["1.self_attn.in_proj_weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert not weights["0.weight"][1].any() and weights["0.weight"][0].any()
    assert torch.equal(weights["1.norm1.weight"], torch.ones(64))


# Inputs ---------------------------------------------------------------------------------------------------------


def test_inputs_are_of_the_right_kind() -> None:
    (x,) = inputs(PresetModel(preset="lenet"), 4, seed=0, dtype=torch.bfloat16)
    assert x.shape == (4, 1, 28, 28) and x.dtype == torch.bfloat16
    embedding = {"type": "Embedding", "num_embeddings": 3, "embedding_dim": 2}
    (tokens,) = inputs(layers(embedding, shape=[50]), 4, seed=0, dtype=torch.bfloat16)
    assert tokens.shape == (4, 50) and tokens.dtype == torch.int64
    assert tokens.unique().tolist() == [0, 1, 2]


def test_the_square_root_of_one_and_minus_one_through_every_program() -> None:
    model = layers({"type": "Sqrt"}, shape=[2], example_input=[1, -1])
    module = build(model, seed=0).eval()
    (x,) = inputs(model, 2, seed=0)
    assert x.tolist() == [[1, -1], [1, -1]]
    with torchscript():
        programs = [module, torch.jit.script(module), torch.jit.trace(module, x, check_trace=False)]
    programs.append(torch.export.export(module, (x,)).module())
    for program in programs:
        y = program(x)
        assert y[:, 0].tolist() == [1, 1] and y[:, 1].isnan().all()


# Faults ---------------------------------------------------------------------------------------------------------


def test_weights_that_no_memory_holds() -> None:
    small = {"type": "Linear", "in_features": 2, "out_features": 2**31}
    absurd = {"type": "Linear", "in_features": 2**31, "out_features": 2**31}
    layer = parse_layer(absurd)
    with pytest.raises(OutOfMemory, match=r"layer 1 \(Linear\): its \d+ parameters do not fit into memory"):
        sequential([parse_layer({**small, "out_features": 2}), layer])


def test_a_layer_that_torch_refuses_is_named() -> None:
    broken = parse_layer({"type": "Conv2d", "in_channels": 4, "out_channels": 4, "kernel_size": 1})
    with pytest.raises(InvalidModel, match=r"layer 1 \(Conv2d\) cannot be built: .*divisible by groups"):
        sequential([parse_layer({"type": "ReLU"}), broken.model_copy(update={"groups": 3})])
