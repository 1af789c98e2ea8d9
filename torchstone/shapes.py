"""What each torch.nn layer makes of a sample's shape, and how many parameters it has: plain arithmetic, no torch.

    linear(Linear(in_features=512, out_features=256), (512,))     # (256,)
    linear(Linear(in_features=512, out_features=256), (10,))      # raises Misfit("[.., 512]")

A shape is that of one sample: the batch dimension stands before it and is never touched, so arguments that count
dimensions as torch does (`dim`, `start_dim`) may not name dimension 0. `layer` is a layer's checked arguments; which
function belongs to which layer type says the table in `torchstone.layers`. torch also takes inputs without a batch
dimension; here the number of dimensions must be that of a batch, so that a batch is never taken for channels.
"""

from __future__ import annotations

import math
from typing import Any

Shape = tuple[int, ...]

_SPATIAL = {1: "length", 2: "height, width", 3: "depth, height, width"}


class Misfit(ValueError):
    """A layer cannot take the shape that it gets. `expects` completes "layer 2 (Linear) expects ..."."""

    def __init__(self, expects: str) -> None:
        super().__init__(expects)
        self.expects = expects


def each(value: Any, count: int) -> tuple[Any, ...]:
    """torch's int-or-tuple arguments as a tuple: 3 means 3 in every dimension."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) * count


def dimension(dim: int, shape: Shape) -> int:
    """torch's `dim`, which counts the batch as 0, as an index into a sample's shape."""
    rank = len(shape) + 1
    index = dim + rank if dim < 0 else dim
    if index == 0:
        raise Misfit(f"a dim other than the batch's (dim {dim})")
    if not 0 < index < rank:
        raise Misfit(f"at least {dim if dim >= 0 else -dim - 1} dimensions after the batch's (dim {dim})")
    return index - 1


def channels_first(channels: int | None, spatial: int, shape: Shape) -> Shape:
    """The spatial part of a [channels, ...] shape."""
    if len(shape) != spatial + 1 or (channels is not None and shape[0] != channels):
        raise Misfit(f"[{channels or 'channels'}, {_SPATIAL[spatial]}]")
    return shape[1:]


# Layers that leave the shape alone ------------------------------------------------------------------------------


def same(layer: Any, shape: Shape) -> Shape:
    return shape


def same_spatial(spatial: int) -> Any:
    """A layer that treats whole channels, such as Dropout2d."""

    def shape_of(layer: Any, shape: Shape) -> Shape:
        channels_first(None, spatial, shape)
        return shape

    return shape_of


def softmax(layer: Any, shape: Shape) -> Shape:
    if layer.dim is not None:
        dimension(layer.dim, shape)
    elif len(shape) == 2:  # where torch's implicit choice would be the batch
        raise Misfit("a dim where the input has two dimensions after the batch's")
    return shape


def prelu(layer: Any, shape: Shape) -> Shape:
    if layer.num_parameters not in (1, shape[0]):
        raise Misfit(f"[{layer.num_parameters}, ..]")
    return shape


def batch_norm(spatial: int) -> Any:
    def shape_of(layer: Any, shape: Shape) -> Shape:
        if spatial == 1 and len(shape) == 1:
            if shape != (layer.num_features,):
                raise Misfit(f"[{layer.num_features}] or [{layer.num_features}, length]")
            return shape
        channels_first(layer.num_features, spatial, shape)
        return shape

    return shape_of


def instance_norm(spatial: int) -> Any:
    def shape_of(layer: Any, shape: Shape) -> Shape:
        if math.prod(channels_first(layer.num_features, spatial, shape)) == 1:
            raise Misfit("more than one value per channel")
        return shape

    return shape_of


def group_norm(layer: Any, shape: Shape) -> Shape:
    if shape[0] != layer.num_channels:
        raise Misfit(f"[{layer.num_channels}, ..]")
    if math.prod(shape) == layer.num_groups:
        raise Misfit("more than one value per group")
    return shape


def layer_norm(layer: Any, shape: Shape) -> Shape:
    trailing = each(layer.normalized_shape, 1)
    if shape[-len(trailing) :] != trailing:
        raise Misfit(f"[.., {', '.join(map(str, trailing))}]")
    return shape


def transformer_encoder(layer: Any, shape: Shape) -> Shape:
    if len(shape) != 2 or shape[1] != layer.d_model:
        raise Misfit(f"[sequence, {layer.d_model}]")
    return shape


# Layers that change it ------------------------------------------------------------------------------------------


def linear(layer: Any, shape: Shape) -> Shape:
    if shape[-1] != layer.in_features:
        raise Misfit(f"[.., {layer.in_features}]")
    return (*shape[:-1], layer.out_features)


def embedding(layer: Any, shape: Shape) -> Shape:
    return (*shape, layer.embedding_dim)


def glu(layer: Any, shape: Shape) -> Shape:
    index = dimension(layer.dim, shape)
    if shape[index] % 2:
        raise Misfit(f"an even size in dim {layer.dim}")
    return (*shape[:index], shape[index] // 2, *shape[index + 1 :])


def flatten(layer: Any, shape: Shape) -> Shape:
    start, end = dimension(layer.start_dim, shape), dimension(layer.end_dim, shape)
    if end < start:
        raise Misfit(f"start_dim {layer.start_dim} not to come after end_dim {layer.end_dim}")
    return (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :])


def unflatten(layer: Any, shape: Shape) -> Shape:
    index, sizes = dimension(layer.dim, shape), list(layer.unflattened_size)
    known = math.prod(size for size in sizes if size != -1)
    if shape[index] % known or (-1 not in sizes and known != shape[index]):
        raise Misfit(f"a size that unfolds into {sizes} in dim {layer.dim}")
    filled = [shape[index] // known if size == -1 else size for size in sizes]
    return (*shape[:index], *filled, *shape[index + 1 :])


def convolution(spatial: int) -> Any:
    def shape_of(layer: Any, shape: Shape) -> Shape:
        sizes = channels_first(layer.in_channels, spatial, shape)
        kernel, stride, dilation = (each(v, spatial) for v in (layer.kernel_size, layer.stride, layer.dilation))
        if layer.padding == "same":
            padding = tuple(math.ceil(d * (k - 1) / 2) for k, d in zip(kernel, dilation, strict=True))
        else:
            padding = each(0 if layer.padding == "valid" else layer.padding, spatial)
        if layer.padding_mode in ("reflect", "circular"):
            slack = 1 if layer.padding_mode == "reflect" else 0
            if any(p + slack > size for p, size in zip(padding, sizes, strict=True)):
                raise Misfit(f"at least {[p + slack for p in padding]} to pad by {layer.padding_mode}")
        if layer.padding == "same":
            return (layer.out_channels, *sizes)
        needed = [d * (k - 1) + 1 - 2 * p for k, d, p in zip(kernel, dilation, padding, strict=True)]
        if any(size < need for size, need in zip(sizes, needed, strict=True)):
            raise Misfit(f"at least {[layer.in_channels, *(max(1, need) for need in needed)]} for its kernel")
        strided = ((size - need) // s + 1 for size, need, s in zip(sizes, needed, stride, strict=True))
        return (layer.out_channels, *strided)

    return shape_of


def transposed_convolution(spatial: int) -> Any:
    def shape_of(layer: Any, shape: Shape) -> Shape:
        sizes = channels_first(layer.in_channels, spatial, shape)
        arguments = (layer.kernel_size, layer.stride, layer.padding, layer.output_padding, layer.dilation)
        rows = zip(sizes, *(each(argument, spatial) for argument in arguments), strict=True)
        out = [(size - 1) * s - 2 * p + d * (k - 1) + extra + 1 for size, k, s, p, extra, d in rows]
        if min(out) < 1:
            raise Misfit(f"an input of which its padding leaves something ({out} would be left)")
        return (layer.out_channels, *out)

    return shape_of


def pool(spatial: int) -> Any:
    """MaxPool, AvgPool and LPPool (torch's `pooling_output_shape`)."""

    def shape_of(layer: Any, shape: Shape) -> Shape:
        sizes = channels_first(None, spatial, shape)
        stride = layer.kernel_size if layer.stride is None else layer.stride
        arguments = (layer.kernel_size, stride, getattr(layer, "padding", 0), getattr(layer, "dilation", 1))
        out = []
        for size, k, s, p, d in zip(sizes, *(each(argument, spatial) for argument in arguments), strict=True):
            spare = size + 2 * p - d * (k - 1) - 1
            if spare < 0:
                raise Misfit(f"at least {d * (k - 1) + 1 - 2 * p} in every spatial dimension for its kernel")
            count = (spare + (s - 1 if layer.ceil_mode else 0)) // s + 1
            if layer.ceil_mode and (count - 1) * s >= size + p:  # the last window would lie in the padding alone
                count -= 1
            out.append(count)
        return (shape[0], *out)

    return shape_of


def adaptive_pool(spatial: int) -> Any:
    def shape_of(layer: Any, shape: Shape) -> Shape:
        sizes = channels_first(None, spatial, shape)
        wanted = each(layer.output_size, spatial)
        return (shape[0], *(size if want is None else want for size, want in zip(sizes, wanted, strict=True)))

    return shape_of


def zero_pad2d(layer: Any, shape: Shape) -> Shape:
    height, width = channels_first(None, 2, shape)
    left, right, top, bottom = each(layer.padding, 4)
    kept = [height + min(top, 0) + min(bottom, 0), width + min(left, 0) + min(right, 0)]  # below 0 it crops, first
    if min(kept) < 1:
        raise Misfit(f"an input of which its padding leaves something ({kept} would be left)")
    return (shape[0], height + top + bottom, width + left + right)


def upsample(layer: Any, shape: Shape) -> Shape:
    ranks = {"linear": (2,), "bilinear": (3,), "bicubic": (3,), "trilinear": (4,)}.get(layer.mode, (2, 3, 4))
    if len(shape) not in ranks:
        raise Misfit(f"{' or '.join(map(str, ranks))} dimensions after the batch's for mode {layer.mode!r}")
    spatial = len(shape) - 1
    given = layer.scale_factor if layer.size is None else layer.size
    if isinstance(given, (list, tuple)) and len(given) != spatial:
        raise Misfit(f"{len(given)} spatial dimensions, as its size or scale_factor has")
    if layer.size is not None:
        return (shape[0], *each(layer.size, spatial))
    out = [math.floor(size * factor) for size, factor in zip(shape[1:], each(given, spatial), strict=True)]
    if min(out) < 1:
        raise Misfit(f"an input of which its scale_factor leaves something ({out} would be left)")
    return (shape[0], *out)


def pixel_shuffle(layer: Any, shape: Shape) -> Shape:
    factor = layer.upscale_factor
    height, width = channels_first(None, 2, shape)
    if shape[0] % factor**2:
        raise Misfit(f"[a multiple of {factor**2}, height, width]")
    return (shape[0] // factor**2, height * factor, width * factor)


# Parameters -----------------------------------------------------------------------------------------------------


def no_parameters(layer: Any) -> int:
    return 0


def linear_parameters(layer: Any) -> int:
    return int(layer.in_features * layer.out_features + layer.bias * layer.out_features)


def convolution_parameters(spatial: int) -> Any:
    def count(layer: Any) -> int:
        kernel = math.prod(each(layer.kernel_size, spatial))
        weights = layer.in_channels * layer.out_channels // layer.groups * kernel
        return int(weights + layer.bias * layer.out_channels)

    return count


def channel_norm_parameters(layer: Any) -> int:
    channels = getattr(layer, "num_features", None) or layer.num_channels
    return int(layer.affine * channels * (1 + layer.bias))


def layer_norm_parameters(layer: Any) -> int:
    elements = math.prod(each(layer.normalized_shape, 1))
    return int(layer.elementwise_affine * elements * (1 + getattr(layer, "bias", False)))


def transformer_encoder_parameters(layer: Any) -> int:
    d, ff = layer.d_model, layer.dim_feedforward
    attention = 4 * d * d + layer.bias * 4 * d
    feedforward = 2 * d * ff + layer.bias * (d + ff)
    norms = 2 * d * (1 + layer.bias)
    return int(attention + feedforward + norms)
