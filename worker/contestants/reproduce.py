"""`reproduce.py`: a plain torch script, without Torchstone, that repeats what a `jit` job measured.

    Path("reproduce.py").write_text(reproduction(spec, threads=2))     # python reproduce.py prints a small table

It holds the model's own source and the same seeds, so it makes the same weights and inputs. A training step is repeated
as one, on the kind of device that the job had. It interleaves the variants in one process: enough to see the same order
of magnitude and the same winner, with less care than the job took.
"""

from __future__ import annotations

import ast
import inspect
import json
from types import ModuleType

from torchstone.facts import facts
from torchstone.layers import Layer
from torchstone.models import LayersModel, PresetModel
from torchstone.specs import JitSpec, Variant
from worker.models import initial, layers, presets

_SCRIPT, _TRACE = "torch.jit.script(model)", "torch.jit.trace(model, x, check_trace=False)"
_FORMS = {
    Variant.eager: "model",
    Variant.script: f"reload({_SCRIPT})",
    Variant.trace: f"reload({_TRACE})",
    Variant.script_frozen: f"reload(torch.jit.freeze({_SCRIPT}))",
    Variant.trace_frozen: f"reload(torch.jit.freeze({_TRACE}))",
    Variant.script_optimized: f"torch.jit.optimize_for_inference(torch.jit.freeze({_SCRIPT}))",
    Variant.trace_optimized: f"torch.jit.optimize_for_inference(torch.jit.freeze({_TRACE}))",
    Variant.compile: "torch.compile(model, dynamic=DYNAMIC)",
    Variant.compile_reduce_overhead: 'torch.compile(model, mode="reduce-overhead", dynamic=DYNAMIC)',
    Variant.compile_max_autotune: 'torch.compile(model, mode="max-autotune", dynamic=DYNAMIC)',
    Variant.export_aot: "aot(model, x)",
}
"""How each is made of `model` and `x`; what is missing here needs another engine than torch, or CUDA."""
_INFERENCE_ONLY = {v for v in _FORMS if "frozen" in v or "optimized" in v} | {Variant.export_aot}

_TEMPLATE = '''\
"""{title}: repeats a Torchstone job of kind "jit" with torch alone.

    python reproduce.py
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import math
import random
import statistics
import tempfile
import time
import warnings

import torch
from torch import Tensor, nn

warnings.filterwarnings("ignore", category=DeprecationWarning)
SPEC = {spec}
SEED, THREADS, SAMPLE_S, BUDGET_S = {seed}, {threads}, 2e-3, {budget_s}
DTYPE, DEVICE, GRAD, DYNAMIC = torch.{dtype}, "{device}", {grad}, {dynamic}
MEMORY_FORMAT = torch.{memory_format}
LEFT_OUT = {left_out}  # in the job, and not here

{model_source}

def make_inputs(batch_size):
    {inputs_source}


def laid_out(tensor):
    tensor = tensor.to(DEVICE)
    return tensor.to(memory_format=MEMORY_FORMAT) if tensor.dim() == 4 else tensor


def make_model():
    torch.manual_seed(SEED)
    model = build_model().to(DEVICE, DTYPE).to(memory_format=MEMORY_FORMAT).train(GRAD)
    for layer in model.modules():  # random layers rest
        if "Dropout" in type(layer).__name__:
            layer.eval()
        if isinstance(layer, nn.MultiheadAttention) and GRAD:
            layer.dropout = 0.0
    return model.requires_grad_(GRAD)


def reload(program):
    """What is timed is the saved file, loaded again."""
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    return torch.jit.load(file, map_location=DEVICE)


def aot(model, x):
    program = torch.export.export(model, (x,))
    with tempfile.TemporaryDirectory() as folder:
        return torch._inductor.aoti_load_package(
            torch._inductor.aoti_compile_and_package(program, package_path=folder + "/model.pt2")
        )


def step(form, x):
    """What is timed: a call, or forward and backward."""
    if not GRAD:
        return functools.partial(form, x)
    parameters = list(form.parameters())

    def training_step():
        for parameter in parameters:
            parameter.grad = None
        output = form(x)
        output.backward(torch.ones_like(output))
        return output

    return training_step


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


BUILDERS = {{
{builders}
}}


def block_s(call, calls):
    call()
    synchronize()
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize()
    return (time.perf_counter() - start_s) / calls


def main():
    torch.set_num_threads(THREADS)
    if LEFT_OUT:
        print("not repeated here:", ", ".join(LEFT_OUT))
    for batch_size in {batch_sizes}:
        x = laid_out(make_inputs(batch_size))
        calls = {{}}
        for name, build in BUILDERS.items():
            try:
                call = step(build(make_model(), x), x)
                with contextlib.nullcontext() if GRAD else torch.inference_mode():
                    call()
            except Exception as error:
                if name == "{baseline}":
                    raise
                why = f"{{type(error).__name__}}: {{' '.join(str(error).split())[:200]}}"
                print(f"batch {{batch_size}}, {{name}}: fails: {{why}}")
            else:
                calls[name] = call
        with contextlib.nullcontext() if GRAD else torch.inference_mode():
            expected = step(make_model(), x)().detach()
            for name, call in calls.items():
                for _ in range(20):
                    output = call().detach()
                error = (output - expected).abs().nan_to_num(0.0).max().item()
                print(f"batch {{batch_size}}, {{name}}: largest difference to eager {{error:.3g}}")
            size = {{n: max(1, round(SAMPLE_S / block_s(c, 3))) for n, c in calls.items()}}
            samples = {{name: [] for name in calls}}
            gc.disable()
            end_s = time.perf_counter() + BUDGET_S / len({batch_sizes})
            while time.perf_counter() < end_s or len(samples["{baseline}"]) < 5:
                for name in random.sample(list(calls), len(calls)):
                    samples[name].append(block_s(calls[name], size[name]))
            gc.enable()
        base = statistics.median(samples["{baseline}"])
        for name, seconds in samples.items():
            median = statistics.median(seconds)
            print(f"batch {{batch_size}}, {{name}}: median {{median * 1e6:.2f}} us, {{base / median:.3f}} x {baseline}")


if __name__ == "__main__":
    main()
'''


def reproduction(spec: JitSpec, threads: int, device: str = "cpu") -> str:
    """The script's text."""
    possible = _FORMS.keys() - (_INFERENCE_ONLY if spec.grad else set())
    builders = [v for v in spec.variants if v in possible]
    baseline = spec.baseline if spec.baseline in possible else Variant.eager
    builders = builders if baseline in builders else [baseline, *builders]
    return _TEMPLATE.format(
        title=(spec.name or "A job").replace("\\", "").replace('"', "'"),
        spec=repr(json.loads(spec.model_dump_json())),
        seed=spec.seed,
        threads=threads,
        budget_s=spec.budget_s,
        dtype=spec.dtype,
        model_source=model_source(spec.model),
        inputs_source=_inputs_source(spec.model),
        builders="\n".join(f'    "{v.value}": lambda model, x: {_FORMS[v]},' for v in builders),
        batch_sizes=list(spec.batch_sizes),
        baseline=baseline.value,
        device=device,
        grad=spec.grad,
        dynamic=spec.dynamic_batch,
        memory_format="channels_last" if spec.channels_last else "contiguous_format",
        left_out=[v.value for v in spec.variants if v not in possible],
    )


def model_source(model: PresetModel | LayersModel) -> str:
    """Python that defines `build_model()`, which makes this model with its initial weights."""
    if isinstance(model, PresetModel):
        new_model = f"def new_model():\n    return {model.preset}({model.shape}, {model.outputs})"
        parts = [_definitions(presets, drop={"PRESETS"}), new_model]
    else:
        lines = "".join(f"        {_constructor(layer)},\n" for layer in model.parsed)
        own = [inspect.getsource(layers.OWN[t]) for t in sorted({la.type for la in model.parsed} & layers.OWN.keys())]
        parts = [*own, f"def new_model():\n    return nn.Sequential(\n{lines}    )"]
    parts.append(_definitions(initial, drop=set()))
    parts.append(
        "def build_model():\n    model = new_model()\n"
        f"    set_initial_weights(model, {model.initial!r})\n    return model"
    )
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def _constructor(layer: Layer) -> str:
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in layer.model_dump(exclude={"type"}).items()}
    if layer.type in ("Softmax", "LogSoftmax", "Softmin") and arguments["dim"] is None:
        arguments["dim"] = 1
    prefix = "" if layer.type in layers.OWN else "nn."
    return f"{prefix}{layer.type}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _inputs_source(model: PresetModel | LayersModel) -> str:
    known = facts(model)
    dtype = "torch.int64" if known.input_dtype == "int64" else "DTYPE"
    if isinstance(model, LayersModel) and model.example_input is not None:
        return (
            f"row = torch.tensor({model.example_input!r}, dtype=torch.float64).to({dtype})\n"
            "    return row.expand(batch_size, *row.shape).contiguous()"
        )
    shape = f"(batch_size, {', '.join(map(str, known.input_shape))})"
    draw = f"torch.randn({shape}" if known.high is None else f"torch.randint({known.high}, {shape}"
    return f"return {draw}, generator=torch.Generator().manual_seed(SEED)).to({dtype})"


def _definitions(module: ModuleType, drop: set[str]) -> str:
    """The source of what `module` defines: everything but its docstring, its imports and the names in `drop`."""
    source = inspect.getsource(module)
    lines, kept = source.splitlines(), []
    for node in ast.parse(source).body:
        names = {t.id for t in getattr(node, "targets", [getattr(node, "target", None)]) if isinstance(t, ast.Name)}
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)) or names & drop:
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        kept.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(kept)
