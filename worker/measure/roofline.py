"""How far a result is from the physical limit: its work counted, and set against this host's ceilings.

    work = count(step)                            # Work(flop, bytes) of one call, by torch's own flop counter
    figure = point("script", {"batch_size": 1}, work, seconds, ceilings, dtype="float32", device_type="cpu", cores=1)
    figure.value                                  # achieved FLOP/s over what the roofline allows at this intensity

The work is that of the model run eagerly, in a pass of its own; on torch's `meta` device (`on_shapes`) shapes suffice
and nothing is computed. FLOP are those that torch.utils.flop_counter knows (products and convolutions; an elementwise
operation has none). Bytes are those that each operation reads and writes, as if nothing stayed in a cache and nothing
were fused: a share over 1 says that caches or fusion saved that traffic.

Roofline: Williams, Waterman and Patterson, CACM 52 (4), 2009.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torchstone.ceilings import Ceiling, Ceilings
from torchstone.results import Figure

NAME = "roofline"
_OVER_ONE = {
    "memory": "over 1: caches or fusion saved traffic that is counted",
    "compute": "over 1: faster than this host's measured peak, which a new hardware report would tell anew",
}


@dataclass(frozen=True)
class Work:
    """What one call takes, or why that is not known."""

    flop: int = 0
    bytes: int = 0
    reason: str | None = None

    @classmethod
    def told(cls, answer: dict[str, Any]) -> Work:
        """As a contestant's JSON brings it."""
        return cls(**answer)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up every operation's FLOP, by the formulas of torch's flop counter, and its tensors' bytes; a view has none.

    It does what `FlopCounterMode` does, which cannot be used here: its first operation imports the compiler.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flop = self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and nothing need be imported to say so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if formula is not None:
            self.flop += int(formula(*args, **kwargs, out_val=out))
        if not func.is_view and func not in _FREE:
            tensors = pytree.tree_leaves((args, kwargs, out))
            self.bytes += sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
        return out


_FREE = {torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default}


def count(call: Callable[[], object]) -> Work:
    """The work of one call; with a reason in place of numbers where the call fails."""
    counter = _Counter()
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # the counter does not know what is inside fused attention
        with sdpa_kernel(SDPBackend.MATH), counter:
            call()
    except Exception as error:  # whatever a stranger's model raises is the reason
        return Work(reason=f"its work cannot be counted: {' '.join(str(error).split())[:200]}")
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return Work(counter.flop, counter.bytes)


def inference(model: nn.Module, inputs: tuple[Tensor, ...]) -> Work:
    """The work of one call of the model, without gradients."""

    def call() -> None:
        with torch.no_grad():
            model(*inputs)

    return count(call)


def training(model: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[[Any], Tensor]) -> Work:
    """The work of one forward and backward pass, whose gradients are dropped; an optimiser's is not counted."""
    work = count(lambda: loss(model(*inputs)).backward())  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    return work


def sum_of_outputs(output: Any) -> Tensor:
    """A loss whose gradient is 1 everywhere, for models that are timed without one."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.sum() for leaf in leaves]).sum()


def on_shapes(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A copy of the model and its inputs that have shapes and no contents."""
    return copy.deepcopy(model).to("meta"), tuple(x.to("meta") for x in inputs)


def point(
    of: str,
    at: dict[str, Any],
    work: Work,
    seconds: float | None,
    ceilings: Ceilings,
    *,
    dtype: str,
    device_type: str,
    cores: int,
    devices: int = 1,
) -> Figure:
    """The roofline point of a contestant whose call takes `seconds`: null with a reason where something is missing."""
    row: dict[str, Any] = {"name": NAME, "of": of, "at": at, "value": None, "unit": "1"}
    if work.reason or not seconds:
        return Figure.model_validate({**row, "reason": work.reason or "it was not timed"})
    row |= {"flop": work.flop, "bytes": work.bytes, "seconds": seconds}
    row |= {"flop_per_s": work.flop / seconds, "bytes_per_s": work.bytes / seconds}
    where: dict[str, Any] = {"dtype": dtype, "device_type": device_type, "cores": cores, "devices": devices}
    peak, stream = (ceilings.find(unit, **where) for unit in ("FLOP/s", "B/s"))
    for name, achieved, ceiling in (("flop", work.flop, peak), ("bytes", work.bytes, stream)):
        row[f"{name}_fraction"] = achieved / seconds / ceiling.value if isinstance(ceiling, Ceiling) else None
    if not isinstance(peak, Ceiling):
        return Figure.model_validate({**row, "reason": peak.text})
    if not isinstance(stream, Ceiling):
        return Figure.model_validate({**row, "reason": stream.text})
    if not work.flop or not work.bytes:
        return Figure.model_validate({**row, "reason": "torch's flop counter counts nothing in it"})
    intensity = work.flop / work.bytes
    allowed = min(peak.value, intensity * stream.value)
    row |= {
        "value": work.flop / seconds / allowed,
        "intensity": intensity,
        "bound": "memory" if intensity * stream.value < peak.value else "compute",
        "ceiling_flop_per_s": peak.value,
        "ceiling_bytes_per_s": stream.value,
        "ceiling_job": peak.job,
        "ceiling_grade": peak.grade,
        "method": "achieved FLOP/s over min(peak, intensity x memory bandwidth)",
    }
    return Figure.model_validate(row | remark(row["value"], row["bound"]))


def remark(share: float, bound: str) -> dict[str, str]:
    """What has to be said beside a share of a ceiling, a `note`: more than all of it needs a word."""
    return {"note": _OVER_ONE[bound]} if share > 1 else {}
