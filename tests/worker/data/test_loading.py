"""Data sets as tensors: of the right shape and scale, learnable, and broken files refused."""

from __future__ import annotations

import gzip
import hashlib
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchstone import datasets
from torchstone.errors import DataMissing
from torchstone.specs import TrainSpec, parse_spec
from worker.data import Data, idx, load

REAL = Path(__file__).parents[4] / "shared" / "data" / "fashion-mnist"


def spec(**changes: Any) -> TrainSpec:
    parsed = parse_spec({"kind": "train", "model": {"preset": "mlp"}, **changes})
    assert isinstance(parsed, TrainSpec)
    return parsed


def loaded(*folders: Path, **changes: Any) -> Data:
    told = spec(**changes)
    data = load(told, folders)
    assert data.x.shape == (told.dataset.samples, *told.input_shape)
    assert data.x_test.shape == (told.dataset.test_samples, *told.input_shape)
    assert len(data.y) == len(data.x) and len(data.y_test) == len(data.x_test)
    assert data.classes == told.dataset.classes
    assert data.y.min() >= 0 and data.y.max() < data.classes
    return data


def test_digits() -> None:
    data = loaded()
    assert data.x.mean().item() == pytest.approx(0, abs=1e-5) and data.x.std().item() == pytest.approx(1, abs=1e-5)
    for labels, least in ((data.y, 140), (data.y_test, 34)):
        assert min(labels.bincount().tolist()) >= least  # every class is there as often
    raw = loaded(normalize=False)
    assert raw.x.min() == 0 and raw.x.max() == 1
    torch.testing.assert_close((raw.x - raw.x.mean()) / raw.x.std(), data.x)
    distances = torch.cdist(data.x_test.flatten(1), data.x.flatten(1))
    assert distances.min() > 0, "no test image is among the training images"
    nearest = data.y[distances.argmin(1)]
    assert (nearest == data.y_test).float().mean() > 0.95, "labels belong to their images"


def test_images_are_resized_bilinearly() -> None:
    small, large = loaded(normalize=False), loaded(normalize=False, model={"preset": "lenet"})
    assert large.x.shape[1:] == (1, 28, 28)
    assert large.x.min() >= 0 and large.x.max() <= 1
    middles = (torch.arange(8) * 3.5 + 1.25).round().long()  # of the pixels there were before
    sampled = large.x[..., middles, :][..., middles]
    assert torch.corrcoef(torch.stack([sampled.flatten(), small.x.flatten()]))[0, 1] > 0.98
    flat = loaded(model={"layers": [{"type": "Linear", "in_features": 64, "out_features": 10}], "input_shape": [64]})
    assert torch.equal(flat.x, loaded().x.flatten(1))


def test_synthetic_data_repeat_by_their_own_seed_and_can_be_learned() -> None:
    made = {"samples": 300, "shape": [3, 4], "classes": 5}
    data = loaded(dataset={"synthetic": made}, seed=1)
    again = loaded(dataset={"synthetic": made}, seed=2)
    assert torch.equal(data.x, again.x) and torch.equal(data.y, again.y)
    assert not torch.equal(data.x, loaded(dataset={"synthetic": {**made, "seed": 1}}).x)
    assert data.y.bincount().tolist() == [60] * 5
    assert data.x.std().item() == pytest.approx(1, abs=0.15)
    centres = torch.stack([data.x[data.y == label].mean(0) for label in range(5)])
    nearest = torch.cdist(data.x_test.flatten(1), centres.flatten(1)).argmin(1)
    assert (nearest == data.y_test).float().mean() > 0.9


def test_inline_data_are_taken_as_they_are() -> None:
    rows = {"x": [[1.0], [2], [4]], "y": [0, 1, 0], "classes": 2}
    data = loaded(dataset={"inline": rows})
    assert data.x.tolist() == [[1], [2], [4]] and data.x.dtype == torch.float32
    assert data.x_test.data_ptr() == data.x.data_ptr(), "without test rows the training rows are the test"
    other = loaded(dataset={"inline": {**rows, "x_test": [[3]], "y_test": [1]}})
    assert other.x_test.tolist() == [[3]] and other.y_test.tolist() == [1]


def test_an_embedding_gets_integers() -> None:
    embedding = {"type": "Embedding", "num_embeddings": 5, "embedding_dim": 1}
    model = {"layers": [embedding, {"type": "Flatten"}], "input_shape": [2]}
    data = loaded(model=model, dataset={"inline": {"x": [[0, 4]], "y": [1], "classes": 2}})
    assert data.x.dtype == torch.int64 and data.x.tolist() == [[0, 4]]


# IDX ------------------------------------------------------------------------------------------------------------


def idx_bytes(shape: tuple[int, ...], numbers: bytes, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + numbers


def test_an_idx_file_comes_in_its_shape() -> None:
    found = idx.tensor(idx_bytes((2, 1, 3), bytes([0, 1, 2, 253, 254, 255])))
    assert found.tolist() == [[[0, 1, 2]], [[253, 254, 255]]] and found.dtype == torch.uint8
    assert idx.tensor(idx_bytes((0,), b"")).shape == (0,)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "no IDX file"),
        (b"PK\3\4" + bytes(20), "no IDX file"),
        (idx_bytes((2,), bytes(8), kind=0x0D), "type 0x0d"),
        (idx_bytes((2, 3), bytes(6))[:9], "ends within its header of 12 bytes"),
        (idx_bytes((2, 3), bytes(5)), r"holds 5 bytes where \[2, 3\] needs 6"),
        (idx_bytes((2, 3), bytes(7)), r"holds 7 bytes where \[2, 3\] needs 6"),
    ],
)
def test_what_is_no_idx_file_is_refused(payload: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        idx.tensor(payload)


def test_fashion_mnist_is_read_from_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = datasets.FILES["fashion_mnist"]
    folder = tmp_path / real.folder
    folder.mkdir()
    numbers = torch.arange(2 * 28 * 28).remainder(256).to(torch.uint8)
    payloads = {
        "train-images": idx_bytes((2, 28, 28), numbers.numpy().tobytes()),
        "train-labels": idx_bytes((2,), bytes([3, 9])),
        "test-images": idx_bytes((1, 28, 28), bytes([255] * 784)),
        "test-labels": idx_bytes((1,), bytes([0])),
    }
    for what, payload in payloads.items():
        (folder / f"{real.files[what]}.gz").write_bytes(gzip.compress(payload))
    sums = {what: hashlib.sha256(payload).hexdigest() for what, payload in payloads.items()}
    monkeypatch.setitem(datasets.FILES, "fashion_mnist", replace(real, sha256=sums))
    data = load(spec(dataset={"name": "fashion_mnist"}, normalize=False), [tmp_path])
    assert data.x.shape == (2, 1, 28, 28) and data.y.tolist() == [3, 9] and data.y_test.tolist() == [0]
    torch.testing.assert_close(data.x.flatten(), numbers / 255)
    scaled = load(spec(dataset={"name": "fashion_mnist"}), [tmp_path])
    torch.testing.assert_close(scaled.x_test, torch.full((1, 1, 28, 28), (1 - 0.2860) / 0.3530))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(payloads["test-labels"]))
    with pytest.raises(DataMissing, match="does not hold fashion_mnist's train-labels"):
        load(spec(dataset={"name": "fashion_mnist"}), [tmp_path])


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the real files are not beside the project")
def test_the_real_fashion_mnist() -> None:
    data = loaded(REAL.parent, dataset={"name": "fashion_mnist"})
    assert data.x.mean().item() == pytest.approx(0, abs=1e-3) and data.x.std().item() == pytest.approx(1, abs=1e-3)
    assert data.y.bincount().tolist() == [6000] * 10 and data.y_test.bincount().tolist() == [1000] * 10
