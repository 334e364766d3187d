"""f8.export.program: the bits of the model in a process without this package; a file that loads nowhere is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.target import CAPABILITIES, Target
from fp8compile.testing.gpu.gpus import GPUS

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")  # torch.export uses what PyTorch deprecates

LOAD = """
import sys, torch
for path in sys.argv[1:]:
    x, expected = torch.load(path + ".tensors")
    assert torch.equal(torch.export.load(path).module()(x), expected), path
assert "fp8compile" not in sys.modules
print("equal", len(sys.argv) - 1)
"""


def model_of(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128)).bfloat16()
    return f8.convert(model, recipe, filter="*").eval()


def frozen(name):
    model = model_of(f8.recipes.by_name(name))
    if name == "tensorwise":
        f8.calibrate(model, lambda given: given(rows()))
    return f8.freeze_weights(model)


def rows():
    return torch.randn(16, 128, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_a_program_of_codes_has_the_models_bits_where_this_package_is_not(tmp_path):
    paths, values = [], 2 * (2 * 128 * 256 + 128 + 256)
    for name in ("tensorwise", "rowwise", "nvfp4"):
        model, x = frozen(name), rows()
        program = f8.export.program(model, (x,))
        assert not [node for node in program.graph.nodes if "fp8compile" in str(node.target)]
        paths.append(str(tmp_path / f"{name}.pt2"))
        torch.export.save(program, paths[-1])
        with torch.no_grad():
            torch.save((x, model(x)), f"{paths[-1]}.tensors")
        held = [*program.state_dict.values(), *program.constants.values()]
        assert sum(each.numel() * each.element_size() for each in held) < 0.56 * values
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, *paths], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert ran.stdout.strip() == "equal 3", ran.stderr


def test_a_program_that_would_load_nowhere_is_not_saved(tmp_path):
    model, x = model_of(f8.recipes.rowwise()), rows()
    with torch.no_grad():
        program = torch.export.export(model, (x,))
    (tmp_path / "undecomposed.pt2").write_text("older")
    with pytest.raises(RuntimeError, match=r"fp8compile.export.program\(model, args\)"):
        torch.export.save(program, tmp_path / "undecomposed.pt2")
    assert (tmp_path / "undecomposed.pt2").read_text() == "older"


def test_the_gemm_is_that_of_the_device_that_serves():
    model, x = frozen("blockwise"), rows()
    is_native = {}
    for target in ("cpu", "h100"):
        graph = f8.export.program(model, (x,), target=target).graph
        is_native[target] = any("_scaled_mm" in str(node.target) for node in graph.nodes)
    assert is_native == {"cpu": False, "h100": True}
    with pytest.raises(RuntimeError, match=r"is MX, which needs compute capability 10\.0"):
        f8.export.program(frozen("mxfp8"), (x,), target="h100")


def test_sizes_may_change():
    model, x = frozen("rowwise"), rows()
    program = f8.export.program(model, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2)},))
    with torch.no_grad():
        assert torch.equal(program.module()(x[:5]), model(x[:5]))


def test_bad_arguments_are_said():
    with pytest.raises(ValueError, match="Call fp8compile"):
        f8.export.program(nn.Linear(4, 4), (torch.zeros(1, 4),))
    with pytest.raises(ValueError, match="`target` is 'h1000'; it must be one of 'cpu', 'h100'"):
        f8.export.program(frozen("rowwise"), (rows(),), target="h1000")


def test_names_of_targets_are_those_that_can_be_pretended():
    assert {name: Target("cuda", each) for name, each in CAPABILITIES.items()} == {
        name: gpu.target for name, gpu in GPUS.items() if gpu.target.hip is None
    }
