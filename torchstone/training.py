"""The `train` experiment's spec: one model trained by several strategies on the same data, seed and global batch.

    spec = parse_spec({"kind": "train", "model": {"preset": "lenet"}, "dataset": {"name": "fashion_mnist"},
                       "strategies": ["single", "scratch", "ddp"], "devices": {"count": 2}, "epochs": 10})
    spec.fitted_model          # the model with the data's shape and classes filled in: what is built and trained
    spec.input_shape           # (1, 28, 28): of a sample as that model takes it, after any resizing or flattening
    spec.lr_factor(2)          # by how much lr_scaling raises the learning rate on two devices

A preset takes the shape and the classes of the data: `mlp` flattens images, `transformer` reads their rows, and for
`lenet` and `resnet18` they are resized to 28x28 unless `resize` or the model's `input_shape` says otherwise. A list of
layers must fit the data as it stands. Strategies that cannot run a model are no fault of the spec: the job names them
in `skipped`.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, WrapValidator, model_validator

from torchstone.base_spec import BaseSpec
from torchstone.data_specs import DatasetSpec, NamedDataset, integers_fault
from torchstone.layers import LAYERS
from torchstone.models import LayersModel, ModelSpec, PresetModel
from torchstone.shapes import Shape
from torchstone.strict import Strict, each_once, refusal

_NON_NEGATIVE = Field(0.0, ge=0)
LearningRate = Annotated[float, Field(ge=0, description="0 = nothing is learned: losses of the initial weights.")]


class Strategy(StrEnum):
    """A way of training on several devices."""

    single = "single"
    scratch = "scratch"
    replicate = "replicate"
    ddp = "ddp"
    fsdp = "fsdp"
    tensor = "tensor"
    pipeline = "pipeline"
    parameter_server = "parameter_server"


class Scaling(StrEnum):
    """What grows with the number of devices: nothing, or the batch."""

    strong = "strong"
    weak = "weak"


class Sgd(Strict):
    """Stochastic gradient descent, with momentum where it is told (torch.optim.SGD)."""

    name: Literal["sgd"] = "sgd"
    lr: LearningRate = 0.1
    momentum: float = Field(0.0, ge=0, lt=1)
    dampening: float = _NON_NEGATIVE
    weight_decay: float = _NON_NEGATIVE
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise refusal([(("nesterov",), "needs a momentum over 0 and no dampening")])
        return self


class Adam(Strict):
    """Adam (torch.optim.Adam)."""

    name: Literal["adam"]
    lr: LearningRate = 1e-3
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), strict=False
    )
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = _NON_NEGATIVE
    amsgrad: bool = False


class AdamW(Adam):
    """Adam with its weight decay apart from the gradient (torch.optim.AdamW)."""

    name: Literal["adamw"]  # type: ignore[assignment]
    weight_decay: float = Field(1e-2, ge=0)


_OPTIMIZERS: dict[str, type[Sgd] | type[Adam] | type[AdamW]] = {"sgd": Sgd, "adam": Adam, "adamw": AdamW}


def _optimizer(body: Any, _: Any) -> Sgd | Adam | AdamW:
    """Choose the class by `name`, so that every fault points into what the client wrote."""
    if isinstance(body, (Sgd, Adam)):
        return body
    if not isinstance(body, dict):
        raise refusal([((), 'must be an object such as {"name": "sgd", "lr": 0.1}')])
    name = body.get("name", "sgd")
    if not isinstance(name, str) or name not in _OPTIMIZERS:
        raise refusal([(("name",), f"unknown optimizer {str(name)[:80]!r}; there are: {', '.join(_OPTIMIZERS)}")])
    return _OPTIMIZERS[name].model_validate(body)


OptimizerSpec = Annotated[Sgd | Adam | AdamW, WrapValidator(_optimizer)]


class Augment(Strict):
    """Random changes of the training images, drawn anew in every epoch."""

    crop_padding: int = Field(0, ge=0, le=64, description="Zeros on all sides; then a crop of the old size.")
    flip: bool = Field(False, description="Mirror half of the images from left to right.")


class TrainSpec(BaseSpec):
    """Data-parallel training on k devices, by hand and by library: is it equal, how fast, how does it scale."""

    kind: Literal["train"]
    model: ModelSpec
    dataset: DatasetSpec = NamedDataset(name="digits")
    strategies: list[Annotated[Strategy, Field(strict=False)]] = Field(
        default_factory=lambda: [Strategy.single, Strategy.scratch, Strategy.ddp],
        min_length=1,
        max_length=16,
        description="single runs on the first leased device, all others on all of them.",
    )
    scaling: list[Annotated[Scaling, Field(strict=False)]] = Field(
        default_factory=lambda: [Scaling.strong],
        min_length=1,
        max_length=2,
        description="strong = batch_size in all, split over the devices; weak = batch_size on each device.",
    )
    epochs: int = Field(10, ge=1, le=1_000_000)
    max_steps: int | None = Field(None, ge=1, description="Stop after so many steps, even within an epoch.")
    target_accuracy: float | None = Field(None, gt=0, le=1, description="Stop once the test accuracy is this high.")
    batch_size: int = Field(256, ge=1, le=1 << 24, description="Global: samples that one step of all devices takes.")
    eval_batch_size: int = Field(1024, ge=1, le=1 << 24)
    gradient_accumulation: int = Field(1, ge=1, le=65536, description="Parts that each device's share is cut into.")
    optimizer: OptimizerSpec = Sgd()
    loss_reduction: Literal["mean", "sum"] = Field("mean", description="mean = over the true global batch.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="Multiply lr by the number of devices, or by its square root."
    )
    schedule: Literal["constant", "cosine", "step"] = Field("constant", description="How lr goes on after the warm-up.")
    warmup_steps: int = Field(0, ge=0, le=1_000_000_000, description="Steps in which lr rises linearly to its value.")
    step_epochs: int = Field(30, ge=1, description="schedule step: epochs after which lr is multiplied by step_gamma.")
    step_gamma: float = Field(0.1, gt=0, le=1)
    shuffle: bool = True
    drop_last: bool = Field(False, description="Leave out the last batch of an epoch where it would be short.")
    batch_norm: Literal["per_device", "synchronized"] = Field(
        "per_device", description="Whether BatchNorm's statistics are of each device's share or of the whole batch."
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="bfloat16 = autocast; weights stay float32.")
    compile: bool = Field(False, description="torch.compile the model; its time is told apart.")
    channels_last: bool | None = Field(
        None,
        description="Images and convolution weights with their channels innermost; null = on CPUs, where it is faster.",
    )
    normalize: bool = Field(
        True, description="Images minus the mean of the training set, over its deviation; false = from 0 to 1."
    )
    resize: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=2, max_length=2)] | None = Field(
        None, description="[height, width] of the images, interpolated; null = what the model needs."
    )
    augment: Augment | None = None
    microbatches: int = Field(4, ge=1, le=4096, description="pipeline: parts of a batch that are under way at once.")
    parameter_servers: Literal["one", "split"] = Field(
        "one", description="parameter_server: one device serves all weights, or each device a part of them."
    )
    check_steps: int = Field(3, ge=1, le=1000, description="First steps that must equal the reference's.")
    record_steps: bool = Field(False, description="Add curves of the loss by step and by rank.")
    rank_timeout_s: float = Field(20, ge=1, le=3600, description="A rank that shows no life this long ends the job.")

    @property
    def image_size(self) -> tuple[int, int] | None:
        """[height, width] that images are resized to; None where they stay as they are."""
        shape = self.dataset.shape
        wanted: Shape = shape
        if self.resize is not None:
            wanted = (shape[0], *self.resize)
        elif isinstance(self.model, PresetModel) and len(shape) == 3:
            told = self.model.input_shape is not None or self.model.preset in ("lenet", "resnet18")
            if told and len(self.model.shape) == 3:
                wanted = (shape[0], *self.model.shape[1:])
        return (wanted[1], wanted[2]) if wanted != shape else None

    @property
    def data_shape(self) -> Shape:
        """Of a sample after resizing."""
        return self.dataset.shape if self.image_size is None else (self.dataset.shape[0], *self.image_size)

    @property
    def input_shape(self) -> Shape:
        """Of a sample as the model takes it: that of the data, flat where a list of layers takes it flat."""
        shape = self.data_shape
        return (math.prod(shape),) if self._is_flattened(shape) else shape

    @property
    def fitted_model(self) -> PresetModel | LayersModel:
        """The model to build and train: a preset has the data's shape and classes filled in."""
        if isinstance(self.model, LayersModel):
            return self.model
        return self.model.model_copy(update={"input_shape": self.input_shape, "classes": self.dataset.classes})

    @property
    def data_bytes(self) -> int:
        """What the whole data set takes in memory, held once."""
        return 4 * math.prod(self.input_shape) * (self.dataset.samples + self.dataset.test_samples)

    @property
    def largest_share(self) -> int:
        """The samples of a full batch whose activations one device holds at once, in the strategy that holds most."""
        parts = {Strategy.single: 1, Strategy.pipeline: self.microbatches}
        fewest = min(parts.get(strategy, self.devices.count) for strategy in self.strategies)
        return max(1, min(self.batch_size, self.dataset.samples) // (fewest * self.gradient_accumulation))

    def lr_factor(self, devices: int) -> float:
        """What lr is multiplied by on so many devices, as lr_scaling says."""
        return {"none": 1.0, "linear": float(devices), "sqrt": math.sqrt(devices)}[self.lr_scaling]

    def _is_flattened(self, shape: Shape) -> bool:
        if isinstance(self.model, PresetModel):
            return False
        wanted = self.model.input_shape
        return len(wanted) == 1 and len(shape) > 1 and wanted[0] == math.prod(shape)

    @model_validator(mode="after")
    def _each_is_named_once(self) -> Self:
        each_once(self, "strategies", "scaling")
        return self

    @model_validator(mode="after")
    def _model_fits_the_data(self) -> Self:
        is_image = len(self.dataset.shape) == 3
        for option in ("resize", "augment"):
            if getattr(self, option) is not None and not is_image:
                detail = f"is for images, [channels, height, width], but a sample is {list(self.dataset.shape)}"
                raise refusal([((option,), detail)])
        if isinstance(self.model, LayersModel):
            self._layers_fit(self.model)
        else:
            self._preset_fits(self.model)
        return self

    def _preset_fits(self, model: PresetModel) -> None:
        shape, classes = self.input_shape, self.dataset.classes
        if model.input_shape is not None and model.input_shape != shape:
            detail = f"is {list(model.input_shape)}, but a sample of the data is {list(shape)}"
            raise refusal([(("model", "input_shape"), detail)])
        if model.classes is not None and model.classes != classes:
            raise refusal([(("model", "classes"), f"is {model.classes}, but the data have {classes} classes")])
        fitted = {"preset": model.preset, "input_shape": list(shape), "classes": classes}
        try:
            PresetModel.model_validate(fitted)
        except ValidationError as error:
            raise refusal([(("model", "preset"), error.errors()[0]["msg"])]) from None

    def _layers_fit(self, model: LayersModel) -> None:
        shape = self.input_shape
        if tuple(model.input_shape) != shape:
            hint = "; resize: [height, width] can change that" if len(shape) == 3 == len(model.input_shape) else ""
            detail = f"is {model.input_shape}, but a sample of the data is {list(shape)}{hint}"
            raise refusal([(("model", "input_shape"), detail)])
        after: Shape = shape
        for layer in model.parsed:
            after = LAYERS[layer.type].shape(layer, after)
        if after != (self.dataset.classes,):
            detail = f"end in {list(after)}, but the data have {self.dataset.classes} classes"
            raise refusal([(("model", "layers"), detail)])
        high = getattr(model.parsed[0], "num_embeddings", None)
        fault = None if high is None else integers_fault(self.dataset, high)
        if fault:
            raise refusal([(("dataset",), fault)])

    @model_validator(mode="after")
    def _there_is_a_step_to_take(self) -> Self:
        if self.drop_last and self.batch_size > self.dataset.samples:
            detail = f"drop_last leaves no batch of {self.batch_size}: there are {self.dataset.samples} samples"
            raise refusal([(("batch_size",), detail)])
        if self.gradient_accumulation > self.batch_size:
            detail = f"a batch of {self.batch_size} cannot be cut into {self.gradient_accumulation} parts"
            raise refusal([(("gradient_accumulation",), detail)])
        return self
