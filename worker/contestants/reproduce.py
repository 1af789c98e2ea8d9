"""`reproduce.py`: a plain torch script, without Torchstone, that repeats what a `jit` job measured.

    Path("reproduce.py").write_text(reproduction(spec, threads=2))     # python reproduce.py prints a small table

It holds the model's own source and the same seeds, so it makes the same weights and inputs. It interleaves the variants
in one process: enough to see the same order of magnitude and the same winner, with less care than the job took.
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

_BUILDERS = {
    Variant.eager: "lambda model, x: model",
    Variant.script: "lambda model, x: reload(torch.jit.script(model))",
    Variant.trace: "lambda model, x: reload(torch.jit.trace(model, x, check_trace=False))",
}

_TEMPLATE = '''\
"""{title}: repeats a Torchstone job of kind "jit" with torch alone.

    python reproduce.py
"""

from __future__ import annotations

import gc
import io
import math
import random
import statistics
import time
import warnings

import torch
from torch import Tensor, nn

warnings.filterwarnings("ignore", category=DeprecationWarning)
SPEC = {spec}
SEED, THREADS, SAMPLE_S, BUDGET_S = {seed}, {threads}, 2e-3, {budget_s}
DTYPE = torch.{dtype}

{model_source}

def make_inputs(batch_size):
    {inputs_source}


def reload(program):
    """What is timed is the saved file, loaded again."""
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    return torch.jit.load(file)


BUILDERS = {{
{builders}
}}


def block_s(call, x, calls):
    call(x)
    start_s = time.perf_counter()
    for _ in range(calls):
        call(x)
    return (time.perf_counter() - start_s) / calls


def main():
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    model = build_model().to(DTYPE).eval().requires_grad_(False)
    for batch_size in {batch_sizes}:
        x = make_inputs(batch_size)
        calls = {{name: build(model, x) for name, build in BUILDERS.items()}}
        with torch.inference_mode():
            expected = model(x)
            for name, call in calls.items():
                for _ in range(20):
                    output = call(x)
                error = (output - expected).abs().max().item()
                print(f"batch {{batch_size}}, {{name}}: largest difference to eager {{error:.3g}}")
            size = {{n: max(1, round(SAMPLE_S / block_s(c, x, 3))) for n, c in calls.items()}}
            samples = {{name: [] for name in calls}}
            gc.disable()
            end_s = time.perf_counter() + BUDGET_S / len({batch_sizes})
            while time.perf_counter() < end_s or len(samples["{baseline}"]) < 5:
                for name in random.sample(list(calls), len(calls)):
                    samples[name].append(block_s(calls[name], x, size[name]))
            gc.enable()
        base = statistics.median(samples["{baseline}"])
        for name, seconds in samples.items():
            median = statistics.median(seconds)
            print(f"batch {{batch_size}}, {{name}}: median {{median * 1e6:.2f}} us, {{base / median:.3f}} x {baseline}")


if __name__ == "__main__":
    main()
'''


def reproduction(spec: JitSpec, threads: int) -> str:
    """The script's text."""
    builders = [v for v in spec.variants if v in _BUILDERS]
    return _TEMPLATE.format(
        title=(spec.name or "A job").replace("\\", "").replace('"', "'"),
        spec=repr(json.loads(spec.model_dump_json())),
        seed=spec.seed,
        threads=threads,
        budget_s=spec.budget_s,
        dtype=spec.dtype,
        model_source=model_source(spec.model),
        inputs_source=_inputs_source(spec.model),
        builders="\n".join(f'    "{v.value}": {_BUILDERS[v]},' for v in builders),
        batch_sizes=list(spec.batch_sizes),
        baseline=spec.baseline.value,
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
