"""`fp8compile doctor`: how the GEMMs of each recipe run on each device, and that it is in order here."""

from __future__ import annotations

import json
import re

import pytest
import torch

import fp8compile as f8
from fp8compile import _compat
from fp8compile._compat import cpu_has_rowwise_gemm
from fp8compile.cli import doctor, doctor_checks, main
from fp8compile.ops import OPS

ALL = "all three"
EMULATED = "emulated in float64"
NO_TENSOR_CORES = "needs a GPU with FP8 tensor cores, compute capability 8.9 or higher"
NO_BLOCKWISE = "needs compute capability 9.0 (H100, H200)"
NO_POWERS = "needs power-of-two scales"
NO_MX = "needs compute capability 10.0 (B200)"
NO_NV = NO_MX
NATIVE_NV = "native, NVFP4 GEMM"
CPU = "native, rowwise GEMM" if cpu_has_rowwise_gemm() else EMULATED
# tensorwise and delayed, rowwise, blockwise, mxfp8, nvfp4
WAYS = {
    None: (CPU, CPU, EMULATED, EMULATED, EMULATED),
    (8, 0): (*[NO_TENSOR_CORES] * 4, NO_NV),
    (8, 9): ("native, tensorwise GEMM", "native, rowwise GEMM", NO_BLOCKWISE, NO_MX, NO_NV),
    (9, 0): ("native, tensorwise GEMM", "native, rowwise GEMM", "native, blockwise GEMM", NO_MX, NO_NV),
    (10, 0): ("native, tensorwise GEMM", "native, rowwise GEMM", NO_POWERS, "native, MX GEMM", NATIVE_NV),
}


def lines_about_recipes(capsys):
    """Recipe, GEMMs, way of each line, with the note that it refers to."""
    assert main(["doctor"]) == 0
    table = capsys.readouterr().out.split("how their GEMMs run\n")[1].split("\n\n")[0].splitlines()[2:]
    notes = dict(line.split(" ", 1) for line in table if line.startswith("["))
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in table if not line.startswith("[")]
    return [(*middle, re.sub(r"\[\d+\]$", lambda m: notes[m[0]], way)) for _, *middle, way in rows]


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # a note is one line

    def pretend(capability):
        monkeypatch.setattr(
            doctor_checks, "run_checks", lambda: iter([{"name": "left out", "ok": True, "detail": "slow"}])
        )
        monkeypatch.setattr(doctor, "_devices", lambda: [{"device": "cpu" if capability is None else "cuda:0"}])
        monkeypatch.setattr(doctor, "_products", lambda devices: [])  # test_cli_doctor_products.py
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return pretend


@pytest.mark.parametrize("capability", WAYS)
def test_each_recipe_on_each_device(capability, capsys, pretended):
    """Native by which GEMM, emulated, or which GPU it needs."""
    pretended(capability)
    tensorwise, rowwise, blockwise, mxfp8, nvfp4 = WAYS[capability]
    expected = [
        ("tensorwise", ALL, tensorwise),
        ("rowwise", ALL, rowwise),
        ("rowwise_bf16_wgrad", "output, grad_input", rowwise),
        ("rowwise_bf16_wgrad", "grad_weight", "bfloat16"),
        ("blockwise", ALL, blockwise),
        ("blockwise_bf16_wgrad", "output, grad_input", blockwise),
        ("blockwise_bf16_wgrad", "grad_weight", "bfloat16"),
        ("mxfp8", ALL, mxfp8),
        ("delayed", ALL, tensorwise),
        ("nvfp4", ALL, nvfp4),
    ]
    assert {name for name, *_ in expected} == set(f8.recipes.names())
    merged = {}
    for name, gemms, way in lines_about_recipes(capsys):
        if name.endswith(", experts"):
            continue
        assert way.startswith("can't run ") == ("needs" in way)
        assert "TwoLevelScaling" not in way, "codes are named by their format"
        short = next((w for w in (NO_TENSOR_CORES, NO_BLOCKWISE, NO_POWERS, NO_MX, NO_NV) if w in way), way)
        merged[name, short] = ", ".join(filter(None, [merged.get((name, short)), gemms]))
    every = {"output", "grad_input", "grad_weight"}
    merged = {key: ALL if set(gemms.split(", ")) == every else gemms for key, gemms in merged.items()}
    assert merged == {(name, way): gemms for name, gemms, way in expected}


NONE = "can't run "
GROUPED, OWN_BLOCKS = "native, rowwise grouped GEMM", "native, blockwise grouped GEMM in Triton"
# rowwise, blockwise, mxfp8
EXPERTS = {
    None: ("group by group",) * 3,
    (8, 9): (f"{GROUPED} in Triton", OWN_BLOCKS, NONE),
    (9, 0): (GROUPED, OWN_BLOCKS, NONE),
    # MX by how PyTorch was built
    (10, 0): (f"{GROUPED} in Triton", OWN_BLOCKS, ("native, MX grouped GEMM", f"{NONE}scaled_grouped_mm")),
}


@pytest.mark.parametrize("capability", EXPERTS)
def test_experts_by_each_recipe_on_each_device(capability, capsys, pretended):
    pretended(capability)
    ways = {name: way for name, _, way in lines_about_recipes(capsys)}
    for recipe, way in zip(("rowwise", "blockwise", "mxfp8"), EXPERTS[capability], strict=True):
        assert ways[f"{recipe}, experts"].startswith(way)
    assert "delayed scaling" in ways["delayed, experts"]


def test_another_librarys_operators_are_not_missing_from_ours(monkeypatch, capsys):
    monkeypatch.setitem(OPS, "other::amax", OPS["fp8compile::amax"])
    assert main(["doctor", "--json"]) == 0
    operators = next(check for check in json.loads(capsys.readouterr().out)["checks"] if check["name"] == "operators")
    assert operators["ok"]


def test_the_machine_of_the_tests_is_in_order(capsys):
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    printed = [line for line in err.splitlines() if "CUDA_HOME" not in line]  # PyTorch's, of a build with CUDA
    assert printed == ["looking for devices ...", *(f"checking {name} ..." for name in doctor_checks.CHECKS)]
    assert found["ok"]
    assert {check["name"] for check in found["checks"]} > {"operators", "constants", "scales"}
    assert [row["recipe"] for row in found["recipes"] if row["device"] == "cpu"] == list(f8.recipes.names())


NEWEST = _compat.KNOWN_VERSIONS[-1]


@pytest.mark.parametrize(("version", "warns"), [((2, 11), False), (NEWEST, False), ((NEWEST[0], 99), True)])
def test_a_newer_pytorch_than_the_tests_know_is_warned_of(version, warns, monkeypatch, capsys, pretended):
    pretended(None)
    monkeypatch.setattr(_compat, "TORCH_VERSION", version)
    assert main(["doctor"]) == 0, "a warning is no fault"
    assert ("WARNING: PyTorch" in capsys.readouterr().out) == warns
    assert main(["doctor", "--json"]) == 0
    assert bool(json.loads(capsys.readouterr().out)["warnings"]) == warns


@pytest.mark.parametrize(("gpu", "capability"), [("rtx4090", (8, 9)), ("h200", (9, 0)), ("b200", (10, 0))])
def test_a_named_gpu_gets_the_answers_of_its_capability(gpu, capability, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["doctor", "--gpu", gpu, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["capability"] == ".".join(map(str, capability))
    ways = {row["recipe"]: row["gemms"][0]["detail"] for row in found["recipes"]}
    for recipe, way in zip(("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"), WAYS[capability], strict=True):
        assert way in ways[recipe]
    assert main(["doctor", "--gpu", gpu]) == 0
    table = capsys.readouterr().out
    assert table.startswith(f"recipes on {found['gpu']}, and how their GEMMs run\nCompute capability ")
    assert "self-checks" not in table


def test_a_gpu_that_is_not_known_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--gpu", "rtx509"])
    assert "Did you mean rtx5090?" in capsys.readouterr().err
