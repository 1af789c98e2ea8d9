"""Where an activation has a kink: units so close to it that rounding decides on which side they are.

    with OtherSide(1e-5):
        model(x).backward()        # with every such unit on the other side

One unit of a ReLU whose input is zero but for rounding has a gradient in one correct program and none in another. What
that does to the gradient of the whole is not small beside other rounding (a thousandth, of 256 x 128 units one), and
depends on these samples and weights: so it is measured, by turning over all units that are as close.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_HAVE_KINKS = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.SELU,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Threshold,
    nn.TransformerEncoderLayer,
)
# Backward operations that look at the activation's own input: where it is among their arguments, and the kinks.
_BACKWARD: dict[Any, tuple[int, Callable[[Any], tuple[float, ...]]]] = {
    _aten.leaky_relu_backward.default: (1, lambda args: (0.0,)),
    _aten._prelu_kernel_backward.default: (1, lambda args: (0.0,)),
    _aten.elu_backward.default: (5, lambda args: (0.0,)),
    _aten.hardtanh_backward.default: (1, lambda args: (args[2], args[3])),
    _aten.hardsigmoid_backward.default: (1, lambda args: (-3.0, 3.0)),
    _aten.hardswish_backward.default: (1, lambda args: (-3.0, 3.0)),
    _aten.hardshrink_backward.default: (1, lambda args: (-args[2], args[2])),
    _aten.softshrink_backward.default: (1, lambda args: (-args[2], args[2])),
}


def has_kinks(module: nn.Module) -> bool:
    """Whether a layer of this model has a gradient that jumps."""
    return any(isinstance(part, _HAVE_KINKS) for part in module.modules())


class OtherSide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Units closer to a kink than `share` of the root mean square of all inputs there count as beyond it."""

    def __init__(self, share: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.share = share

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.relu.default, _aten.relu_.default):  # its backward looks at its result: zero, or more
            return func(self._mirrored(args[0], 0.0, in_place=func is _aten.relu_.default))
        if func is _aten.threshold_backward.default and bool((args[1] < 0).any()):  # of a Threshold's own input
            return func(args[0], self._mirrored(args[1], float(args[2])), *args[2:])
        if func in _BACKWARD:
            place, kinks = _BACKWARD[func]
            mirrored = args[place]
            for kink in kinks(args):
                mirrored = self._mirrored(mirrored, kink)
            args = (*args[:place], mirrored, *args[place + 1 :])
        return func(*args, **kwargs)

    def _mirrored(self, x: Tensor, kink: float, in_place: bool = False) -> Tensor:
        """`x` with what is close to `kink` as far on the other side of it."""
        if not x.is_floating_point():
            return x
        distance = x - kink
        near = distance.abs() < self.share * x.square().mean().sqrt()
        mirrored = torch.where(near, kink - distance, x)
        return x.copy_(mirrored) if in_place else mirrored
