"""Which way belongs to which variant. A new variant is one row here and its name in `torchstone.specs.Variant`."""

from __future__ import annotations

from torchstone.specs import Variant
from worker.contestants import cuda_graph, inductor, onnx, torchscript
from worker.contestants.ways import Build, Way, as_it_is


def _torchscript(build: Build) -> Way:
    return Way(build, suffix=".pt", save=torchscript.save, load=torchscript.load, builds_on_cpu=True)


def _compiled(mode: str) -> Way:
    return Way(
        inductor.compile_with(mode), unavailable=inductor.unavailable, lazy=True, disk_cache=True, shapes="guarded"
    )


WAYS: dict[Variant, Way] = {
    Variant.eager: Way(as_it_is),
    Variant.script: _torchscript(torchscript.script),
    Variant.trace: _torchscript(torchscript.trace),
    Variant.script_frozen: _torchscript(torchscript.script_frozen),
    Variant.trace_frozen: _torchscript(torchscript.trace_frozen),
    # What optimize_for_inference returns saves a broken file without a word: it is timed as it is, and not offered.
    Variant.script_optimized: Way(torchscript.script_optimized),
    Variant.trace_optimized: Way(torchscript.trace_optimized),
    Variant.compile: _compiled("default"),
    Variant.compile_reduce_overhead: _compiled("reduce-overhead"),
    Variant.compile_max_autotune: _compiled("max-autotune"),
    Variant.export_aot: Way(
        inductor.export_aot,
        ".pt2",
        inductor.save_package,
        inductor.load_package,
        unavailable=inductor.unavailable,
        disk_cache=True,
        shapes="fixed_unless_dynamic",
    ),
    Variant.onnxruntime: Way(
        onnx.build,
        ".onnx",
        onnx.save,
        onnx.load,
        unavailable=onnx.unavailable,
        shapes="fixed_unless_dynamic",
    ),
    Variant.cuda_graph: Way(cuda_graph.build, lazy=True, shapes="guarded"),
}
