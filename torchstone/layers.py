"""The torch.nn layers that a model may be made of: their arguments with torch's names and defaults. No torch here.

    layer = parse_layer({"type": "Conv2d", "in_channels": 1, "out_channels": 6, "kernel_size": 5})
    layer.stride                                 # 1
    LAYERS["Conv2d"].shape(layer, (1, 28, 28))   # (6, 24, 24)
    LAYERS["Conv2d"].parameters(layer)           # 156

One row of `LAYERS` is one layer type: its arguments, what it makes of a shape, how many parameters it has. An argument
is `name=type` where it is required, `name=(type, default)` where it is not. `device`, `dtype` and what would change a
layer's answer into a tuple (`return_indices`) are left out on purpose. `Sqrt` is ours, not torch's: the element-wise
square root, which makes NaN of a negative number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal, Union

from pydantic import Field, create_model

from torchstone import arguments as args
from torchstone import shapes
from torchstone.arguments import Factors, Faults, Index, Positive, Probability, Size, ints
from torchstone.shapes import Shape
from torchstone.strict import Strict, near, refusal


class Layer(Strict):
    """The checked arguments of one layer; each type in `LAYERS` has a class of its own under this one."""

    type: str


@dataclass(frozen=True)
class LayerType:
    """One row of the table."""

    name: str
    fields: dict[str, Any]
    """Every argument's type and default, as pydantic's `create_model` takes them."""
    shape: Callable[[Any, Shape], Shape]
    parameters: Callable[[Any], int]
    agree: Callable[[Any], Faults]
    aliases: bool
    """Its output may be its very input, or a view of it (in eval mode)."""

    @cached_property
    def arguments(self) -> type[Layer]:
        """The class that checks them, made when the first model has such a layer: all of them take 30 ms."""
        own_type: Any = (Literal[self.name], ...)
        made: type[Layer] = create_model(self.name, __base__=Layer, type=own_type, **self.fields)
        return made


def _row(
    name: str,
    shape: Callable[[Any, Shape], Shape] = shapes.same,
    parameters: Callable[[Any], int] = shapes.no_parameters,
    agree: Callable[[Any], Faults] = args.nothing_to_agree,
    *,
    aliases: bool = False,
    **arguments: Any,
) -> tuple[str, LayerType]:
    fields = {key: value if isinstance(value, tuple) else (value, ...) for key, value in arguments.items()}
    return name, LayerType(name, fields, shape, parameters, agree, aliases)


_flag = (bool, False)
_inplace = partial(_row, inplace=_flag)
_dropout = partial(_row, p=(Probability, 0.5), inplace=_flag, aliases=True)


def _convolution(name: str, n: int) -> tuple[str, LayerType]:
    return _row(
        name,
        shapes.convolution(n),
        shapes.convolution_parameters(n),
        args.convolution_agrees,
        in_channels=Size,
        out_channels=Size,
        kernel_size=ints(n, 1),
        stride=(ints(n, 1), 1),
        padding=(ints(n, 0, words=("same", "valid")), 0),
        dilation=(ints(n, 1), 1),
        groups=(Size, 1),
        bias=(bool, True),
        padding_mode=(Literal["zeros", "reflect", "replicate", "circular"], "zeros"),
    )


def _transposed_convolution(name: str, n: int) -> tuple[str, LayerType]:
    return _row(
        name,
        shapes.transposed_convolution(n),
        shapes.convolution_parameters(n),
        args.transposed_convolution_agrees(n),
        in_channels=Size,
        out_channels=Size,
        kernel_size=ints(n, 1),
        stride=(ints(n, 1), 1),
        padding=(ints(n, 0), 0),
        output_padding=(ints(n, 0), 0),
        groups=(Size, 1),
        bias=(bool, True),
        dilation=(ints(n, 1), 1),
        padding_mode=(Literal["zeros"], "zeros"),
    )


def _norm(name: str, shape: Callable[[Any, Shape], Shape], *, learned: bool) -> tuple[str, LayerType]:
    """BatchNorm has weights and running statistics by default, InstanceNorm neither."""
    return _row(
        name,
        shape,
        shapes.channel_norm_parameters,
        num_features=Size,
        eps=(Positive, 1e-5),
        momentum=(Probability | None if learned else Probability, 0.1),
        affine=(bool, learned),
        track_running_stats=(bool, learned),
        bias=(bool, True),
    )


def _pool(name: str, n: int, **arguments: Any) -> tuple[str, LayerType]:
    stride = (ints(n, 1) | None, None)
    agree = args.pool_padding_fits(n) if "padding" in arguments else args.nothing_to_agree
    return _row(name, shapes.pool(n), agree=agree, kernel_size=ints(n, 1), stride=stride, ceil_mode=_flag, **arguments)


def _adaptive_pool(name: str, n: int) -> tuple[str, LayerType]:
    return _row(name, shapes.adaptive_pool(n), output_size=ints(n, 1, null_entries=n > 1))


LAYERS: dict[str, LayerType] = dict(
    [
        _row(
            "Linear",
            shapes.linear,
            shapes.linear_parameters,
            in_features=Size,
            out_features=Size,
            bias=(bool, True),
        ),
        _convolution("Conv1d", 1),
        _convolution("Conv2d", 2),
        _convolution("Conv3d", 3),
        _transposed_convolution("ConvTranspose1d", 1),
        _transposed_convolution("ConvTranspose2d", 2),
        # Normalisation
        _norm("BatchNorm1d", shapes.batch_norm(1), learned=True),
        _norm("BatchNorm2d", shapes.batch_norm(2), learned=True),
        _norm("BatchNorm3d", shapes.batch_norm(3), learned=True),
        _norm("InstanceNorm1d", shapes.instance_norm(1), learned=False),
        _norm("InstanceNorm2d", shapes.instance_norm(2), learned=False),
        _row(
            "LayerNorm",
            shapes.layer_norm,
            shapes.layer_norm_parameters,
            normalized_shape=ints(None, 1),
            eps=(Positive, 1e-5),
            elementwise_affine=(bool, True),
            bias=(bool, True),
        ),
        _row(
            "RMSNorm",
            shapes.layer_norm,
            shapes.layer_norm_parameters,
            normalized_shape=ints(None, 1),
            eps=(Positive | None, None),
            elementwise_affine=(bool, True),
        ),
        _row(
            "GroupNorm",
            shapes.group_norm,
            shapes.channel_norm_parameters,
            args.norm_groups_divide_channels,
            num_groups=Size,
            num_channels=Size,
            eps=(Positive, 1e-5),
            affine=(bool, True),
            bias=(bool, True),
        ),
        # Dropout
        _dropout("Dropout"),
        _dropout("Dropout1d", shapes.same_spatial(1)),
        _dropout("Dropout2d", shapes.same_spatial(2)),
        _dropout("Dropout3d", shapes.same_spatial(3)),
        _dropout("AlphaDropout"),
        # Activations
        _inplace("ReLU"),
        _inplace("ReLU6"),
        _inplace("LeakyReLU", negative_slope=(float, 0.01)),
        _row(
            "PReLU", shapes.prelu, lambda layer: int(layer.num_parameters), num_parameters=(Size, 1), init=(float, 0.25)
        ),
        _inplace("ELU", alpha=(float, 1.0)),
        _inplace("SELU"),
        _inplace("CELU", alpha=(Positive, 1.0)),
        _row("GELU", approximate=(Literal["none", "tanh"], "none")),
        _inplace("SiLU"),
        _inplace("Mish"),
        _row("Sigmoid"),
        _row("LogSigmoid"),
        _inplace("Hardsigmoid"),
        _row("Tanh"),
        _row("Tanhshrink"),
        _inplace("Hardtanh", agree=args.bounds_are_ordered, min_val=(float, -1.0), max_val=(float, 1.0)),
        _inplace("Hardswish"),
        _row("Hardshrink", lambd=(float, 0.5)),
        _row("Softshrink", lambd=(args.NonNegative, 0.5)),
        _row("Softplus", beta=(Positive, 1.0), threshold=(float, 20.0)),
        _row("Softsign"),
        _inplace("Threshold", threshold=float, value=float),
        _row("Softmax", shapes.softmax, dim=(Index | None, None)),
        _row("LogSoftmax", shapes.softmax, dim=(Index | None, None)),
        _row("Softmin", shapes.softmax, dim=(Index | None, None)),
        _row("GLU", shapes.glu, dim=(Index, -1)),
        _row("Sqrt"),
        # Pooling
        _pool("MaxPool1d", 1, padding=(ints(1, 0), 0), dilation=(ints(1, 1), 1)),
        _pool("MaxPool2d", 2, padding=(ints(2, 0), 0), dilation=(ints(2, 1), 1)),
        _pool("MaxPool3d", 3, padding=(ints(3, 0), 0), dilation=(ints(3, 1), 1)),
        _pool("AvgPool1d", 1, padding=(ints(1, 0), 0), count_include_pad=(bool, True)),
        _pool(
            "AvgPool2d",
            2,
            padding=(ints(2, 0), 0),
            count_include_pad=(bool, True),
            divisor_override=(Size | None, None),
        ),
        _pool("LPPool1d", 1, norm_type=Positive),
        _pool("LPPool2d", 2, norm_type=Positive),
        _adaptive_pool("AdaptiveAvgPool1d", 1),
        _adaptive_pool("AdaptiveAvgPool2d", 2),
        _adaptive_pool("AdaptiveAvgPool3d", 3),
        _adaptive_pool("AdaptiveMaxPool1d", 1),
        _adaptive_pool("AdaptiveMaxPool2d", 2),
        # Shapes
        _row("Identity", aliases=True),
        _row("Flatten", shapes.flatten, aliases=True, start_dim=(Index, 1), end_dim=(Index, -1)),
        _row(
            "Unflatten",
            shapes.unflatten,
            agree=args.sizes_have_one_unknown,
            aliases=True,
            dim=Index,
            unflattened_size=args.UnflattenedSize,
        ),
        _row("ZeroPad2d", shapes.zero_pad2d, padding=ints(4, -args.LIMIT)),
        _row("PixelShuffle", shapes.pixel_shuffle, aliases=True, upscale_factor=Size),
        _row(
            "Upsample",
            shapes.upsample,
            agree=args.upsample_agrees,
            size=(ints(None, 1) | None, None),
            scale_factor=(Factors | None, None),
            mode=(Literal["nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear"], "nearest"),
            align_corners=(bool | None, None),
        ),
        # Sequences
        _row(
            "Embedding",
            shapes.embedding,
            lambda layer: int(layer.num_embeddings * layer.embedding_dim),
            args.padding_row_exists,
            num_embeddings=Size,
            embedding_dim=Size,
            padding_idx=(int | None, None),
        ),
        _row(
            "TransformerEncoderLayer",
            shapes.transformer_encoder,
            shapes.transformer_encoder_parameters,
            args.transformer_encoder_agrees,
            d_model=Size,
            nhead=Size,
            dim_feedforward=(Size, 2048),
            dropout=(Probability, 0.1),
            activation=(Literal["relu", "gelu"], "relu"),
            layer_norm_eps=(Positive, 1e-5),
            batch_first=_flag,
            norm_first=_flag,
            bias=(bool, True),
        ),
    ]
)


def layer_schema() -> Any:
    """The union of all layers' arguments, for the JSON Schema of a list of layers."""
    classes = tuple(row.arguments for row in LAYERS.values())
    return Annotated[Union[classes], Field(discriminator="type")]  # noqa: UP007 (a union of a tuple)


def parse_layer(body: Any) -> Layer:
    """The layer that `body`, such as {"type": "Linear", "in_features": 2, "out_features": 1}, describes.

    Raises pydantic's ValidationError, which names the argument at fault.
    """
    if not isinstance(body, dict):
        raise refusal([((), 'must be an object such as {"type": "ReLU"}')])
    if "type" not in body:
        raise refusal([(("type",), "the field is required: the name of a torch.nn layer")])
    name = body["type"]
    if not isinstance(name, str) or name not in LAYERS:
        raise refusal([(("type",), f"unknown layer type {str(name)[:80]!r}{near(str(name), LAYERS)}")])
    row = LAYERS[name]
    known = row.arguments.model_fields
    unknown = [argument for argument in body if argument not in known]
    if unknown:
        takes = ", ".join(argument for argument in known if argument != "type") or "none"
        raise refusal(
            [((key,), f"{name} has no argument {key[:80]!r}{near(key, known)}; it takes: {takes}") for key in unknown]
        )
    layer = row.arguments.model_validate(body)
    faults = [((argument,), sentence) for argument, sentence in row.agree(layer)]
    if faults:
        raise refusal(faults)
    return layer
