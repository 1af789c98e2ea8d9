"""Prove that downloaded TorchScript files compute what the eager model computes, with plain torch and nothing else.

    python -I -S same_outputs.py SITE_PACKAGES script.pt trace.pt

-I and -S keep the current folder, the environment and every .pth file off the path: what is left is Python and the
folder SITE_PACKAGES, where torch is. The eager model is not taken from the files: the chapter's MLP is built here, and
gets the job's weights by the job's seed, 0. So equal outputs say that the files hold the right weights *and* the right
program. That the comparison can fail at all is shown by changing one weight.
"""

import importlib.util
import sys
import warnings

site_packages, *files = sys.argv[1:]
sys.path.append(site_packages)

for name in ("torchstone", "worker", "service"):
    assert importlib.util.find_spec(name) is None, f"{name} can be imported here"

import torch  # noqa: E402
from torch import nn  # noqa: E402

warnings.filterwarnings("ignore", "`torch\\.jit\\.", DeprecationWarning)
RTOL = ATOL = 1e-4

torch.manual_seed(0)
eager = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 2)).eval()
inputs = [torch.randn(batch_size, 512) for batch_size in (1, 1, 1, 7)]

with torch.inference_mode():
    expected = [eager(x) for x in inputs]
    assert all(y.isfinite().all() and y.abs().max() > 0 for y in expected)
    for file in files:
        loaded = torch.jit.load(file)
        outputs = [loaded(x) for x in inputs]
        largest = max((y - z).abs().max().item() for y, z in zip(expected, outputs, strict=True))
        for y, z in zip(expected, outputs, strict=True):
            torch.testing.assert_close(z, y, rtol=RTOL, atol=ATOL)
        weights = zip(eager.state_dict().values(), loaded.state_dict().values(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in weights), f"{file}: other weights than the seed gives"

        next(loaded.parameters()).data[0, 0] += 1.0
        assert not torch.allclose(loaded(inputs[0]), expected[0], rtol=RTOL, atol=ATOL), "this check cannot fail"
        print(f"  {file}: equal to eager on {len(inputs)} inputs, largest difference {largest:g}; same weights")

assert not {"torchstone", "worker", "service"} & set(sys.modules)
print(f"  torch {torch.__version__}, Python {sys.version.split()[0]}; torchstone, worker, service: not importable")
