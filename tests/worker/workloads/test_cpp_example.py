"""The C++ example of docs/exported_models.md, built against the pip package's libtorch and run on a real export."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.fresh import run_fresh

SOURCE = Path(__file__).parents[3] / "docs" / "cpp"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a C++ compiler"
)
def test_the_downloaded_model_gives_the_same_output_in_cpp(tmp_path: Path) -> None:
    spec = {"kind": "jit", "model": {"preset": "mlp"}, "variants": ["eager", "script"], "budget_s": 0.2}
    model = run_fresh(spec, tmp_path).kept["script.pt"]
    program = (
        "import sys, warnings, torch; warnings.simplefilter('ignore')\n"
        "print(torch.utils.cmake_prefix_path)\n"
        "with torch.inference_mode():\n"
        "    print(*[repr(v) for v in torch.jit.load(sys.argv[1])(torch.ones(2, 512)).flatten().tolist()])"
    )
    ran = subprocess.run([sys.executable, "-I", "-c", program, str(model)], capture_output=True, text=True, check=True)
    prefix, expected = ran.stdout.strip().splitlines()
    build = tmp_path / "build"
    for command in (
        ["cmake", "-S", SOURCE, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"],
        ["cmake", "--build", build],
    ):
        built = subprocess.run(command, capture_output=True, text=True)
        assert built.returncode == 0, built.stdout + built.stderr
    told = subprocess.run([build / "run_model", model, "2", "512"], capture_output=True, text=True, check=True)
    assert [float(v) for v in told.stdout.split()] == pytest.approx([float(v) for v in expected.split()], rel=1e-6)
