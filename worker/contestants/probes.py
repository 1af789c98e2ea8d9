"""Other inputs than the one that is timed, to find what a built form froze: a branch, a size, a length.

    for name, x in probes(setting, other_shapes=True).items(): ...      # "negated", "other_values", "batch_3", ...

A trace records what one input did. Whatever it took from that input's values or shape for a constant shows on these.
Which probes mean anything for a model, eager decides: those that it refuses are left out.
"""

from __future__ import annotations

from worker.contestants.ways import Inputs, Setting

ROWS = 3
"""A batch size that nobody builds with, and prime."""
_OTHER_SEED = 1_000_003


def probes(setting: Setting, other_shapes: bool) -> dict[str, Inputs]:
    """Inputs by name. `row_alone` is the first row of `batch_3`; `repeated` is what was timed, once more."""
    first = setting.batch_sizes[0]
    timed = setting.inputs(first)
    found = {"repeated": timed, "other_values": setting.inputs(first, setting.seed + _OTHER_SEED)}
    if all(x.is_floating_point() for x in timed):
        found["negated"] = tuple(-x for x in timed)
    if other_shapes:
        rows = setting.inputs(ROWS)
        found["batch_3"] = rows
        found["row_alone"] = tuple(x[:1].contiguous() for x in rows)
        if all(_is_sequence(x.dim(), x.is_floating_point()) and x.shape[1] > 1 for x in rows):
            found["shorter"] = tuple(x[:, : (x.shape[1] + 1) // 2].contiguous() for x in rows)
    return found


def _is_sequence(dimensions: int, floating: bool) -> bool:
    """(batch, length, features), or (batch, length) of tokens."""
    return dimensions == 3 if floating else dimensions == 2
