"""Which way belongs to which variant."""

from __future__ import annotations

from torchstone.specs import Variant
from worker.contestants import torchscript
from worker.contestants.ways import Way, as_it_is

WAYS: dict[Variant, Way] = {
    Variant.eager: Way(as_it_is),
    Variant.script: Way(torchscript.script, ".pt", torchscript.save, torchscript.load),
    Variant.trace: Way(torchscript.trace, ".pt", torchscript.save, torchscript.load),
}
