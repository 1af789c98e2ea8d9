"""`reproduce.py` of a training: a plain torch script without Torchstone that trains the same model on the same data.

    script = reproduction(spec, threads=[1, 1])
    # python reproduce.py                              one device
    # torchrun --nproc-per-node 2 reproduce.py         DistributedDataParallel on two

Model, initial weights, order of the samples, learning rates and loss are those of the job; the sources that it quotes
are the job's own. Named data sets are read from their files, others from the artifact data.npz beside it.
"""

from __future__ import annotations

import inspect
import json

from torchstone.data_specs import NamedDataset
from torchstone.training import TrainSpec
from worker.contestants import reproduce
from worker.data import augmentation, order

_TEMPLATE = '''"""{title}: trained again without Torchstone.

python reproduce.py                            one device
torchrun --nproc-per-node 2 reproduce.py       DistributedDataParallel on two
{hint}"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

SPEC = {spec}
SEED, THREADS, EPOCHS, BATCH_SIZE = {seed}, {threads}, {epochs}, {batch_size}
CHANNELS_LAST, DTYPE, COMPILE = {channels_last}, torch.{dtype}, {compile}

{model_source}

{order_source}

{augmentation_source}

{data_source}


def learning_rate(step, steps_per_epoch, total_steps, devices):
    full = SPEC["optimizer"]["lr"] * {{"none": 1.0, "linear": devices, "sqrt": math.sqrt(devices)}}[SPEC["lr_scaling"]]
    warmup = SPEC["warmup_steps"]
    if step < warmup:
        return full * (step + 1) / warmup
    if SPEC["schedule"] == "cosine":
        return full * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))
    if SPEC["schedule"] == "step":
        return full * SPEC["step_gamma"] ** (step // steps_per_epoch // SPEC["step_epochs"])
    return full


def main():
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    model = build_model()
    if CHANNELS_LAST:
        model = model.to(memory_format=torch.channels_last)
    trained = model
    if world_size > 1:
        dist.init_process_group("gloo")
        trained = nn.parallel.DistributedDataParallel(model)
    if COMPILE:
        trained = torch.compile(trained)
    numbers = {{key: value for key, value in SPEC["optimizer"].items() if key != "name"}}
    kind = {{"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}}[SPEC["optimizer"]["name"]]
    optimizer = kind(model.parameters(), **numbers)
    x, y, x_test, y_test = load_data()
    parts = batches(len(y), BATCH_SIZE, SPEC["drop_last"])
    total_steps = min(len(parts) * EPOCHS, SPEC["max_steps"] or len(parts) * EPOCHS)
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{{SEED}}/{{rank}}".encode()).digest()[:8], "big") >> 1)
    step = 0
    for epoch in range(EPOCHS):
        visit = epoch_order(len(y), epoch, SEED, SPEC["shuffle"])
        change = Augmentation(SimpleNamespace(**SPEC["augment"]), len(y), epoch, SEED) if SPEC["augment"] else None
        begun_s, total, seen = time.perf_counter(), 0.0, 0
        for part in parts:
            if step == total_steps:
                break
            batch = visit[part]
            share = torch.tensor_split(batch, world_size)[rank]
            largest = -(-len(batch) // world_size)
            pieces = torch.tensor_split(share, max(1, min(SPEC["gradient_accumulation"], largest)))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, len(parts), total_steps, world_size)
            optimizer.zero_grad()
            for number, piece in enumerate(pieces, 1):
                inputs = x[piece] if change is None else change(x[piece], piece)
                if CHANNELS_LAST and inputs.dim() == 4:
                    inputs = inputs.contiguous(memory_format=torch.channels_last)
                with nullcontext() if world_size == 1 or number == len(pieces) else trained.no_sync():
                    with nullcontext() if DTYPE == torch.float32 else torch.autocast("cpu", DTYPE):
                        output = trained(inputs)
                    loss = nn.functional.cross_entropy(output.float(), y[piece], reduction="sum")
                    # DDP averages over ranks: what is wanted is the sum, over the samples of the whole batch.
                    scale = world_size / len(batch) if SPEC["loss_reduction"] == "mean" else world_size
                    (loss * scale).backward()
                total += float(loss.detach())
            optimizer.step()
            seen, step = seen + len(share), step + 1
        seconds = time.perf_counter() - begun_s
        model.eval()
        with torch.inference_mode():
            size = SPEC["eval_batch_size"]
            found = torch.cat([model(part).argmax(1) for part in x_test.split(size)])
        model.train()
        if rank == 0 and seen:
            accuracy = (found == y_test).float().mean().item()
            print(f"epoch {{epoch + 1}}: {{seconds:.2f}} s, loss {{total / seen:.4f}}, test accuracy {{accuracy:.4f}}")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_FROM_ARTIFACT = '''def load_data():
    """The artifact data.npz of the job, beside this script."""
    with np.load(Path(__file__).with_name("data.npz")) as archive:
        return tuple(torch.from_numpy(archive[name]) for name in ("x", "y", "x_test", "y_test"))'''

_FROM_IDX = '''def load_data():
    """The set's own files, from the folder named on the command line (or data/)."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data")

    def read(name):
        (path,) = sorted(folder.rglob(name + "*"))[:1]
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
        return torch.frombuffer(bytearray(raw[4 + 4 * raw[3] :]), dtype=torch.uint8).reshape(shape)

    def images(name):
        x = read(name)[:, None].float() / 255
        x = (x - 0.2860) / 0.3530 if {normalize} else x
        if {size} is not None:
            x = nn.functional.interpolate(x, {size}, mode="bilinear", antialias=True)
        return x.reshape(len(x), *{shape})

    y, y_test = read("train-labels").long(), read("t10k-labels").long()
    return images("train-images"), y, images("t10k-images"), y_test'''


def reads_files(spec: TrainSpec) -> bool:
    """Whether the script reads the data set's own files, and not an artifact."""
    return isinstance(spec.dataset, NamedDataset) and spec.dataset.name != "digits"


def reproduction(spec: TrainSpec, threads: list[int]) -> str:
    """The script's text; `threads` of each device."""
    files = reads_files(spec)
    from_idx = _FROM_IDX.format(normalize=spec.normalize, size=spec.image_size, shape=tuple(spec.input_shape))
    return _TEMPLATE.format(
        title=(spec.name or "A training").replace("\\", "").replace('"', "'"),
        hint="Its first argument is the folder that holds the data set.\n" if files else "It reads data.npz.\n",
        spec=repr(json.loads(spec.model_dump_json(exclude={"dataset"}))),
        seed=spec.seed,
        threads=threads[0],
        epochs=spec.epochs,
        batch_size=spec.batch_size,
        channels_last=spec.channels_last is not False,
        dtype=spec.dtype,
        compile=spec.compile,
        model_source=reproduce.model_source(spec.fitted_model),
        order_source="\n\n".join(
            inspect.getsource(part) for part in (order.stream_seed, order.stream, order.epoch_order, order.batches)
        ),
        augmentation_source=inspect.getsource(augmentation.Augmentation),
        data_source=from_idx if files else _FROM_ARTIFACT,
    )
