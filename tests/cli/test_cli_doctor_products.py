"""`fp8compile doctor` runs each product of a GPU once, rehearsed: GPUs of each kind, products that fail as real ones.

The processes of the products are this one, except where the test says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline

from fp8compile.cli import doctor, doctor_product_process, doctor_products, main
from fp8compile.cli.self_test_cases import product_cases
from fp8compile.target import Target
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.program.products import PRODUCTS

DYING = Path(__file__).parents[1] / "helpers" / "dying_process.py"
NOT_SUPPORTED = (
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic( ltHandle, "
    "computeDesc.descriptor(), Adesc.descriptor(), Bdesc.descriptor(), Cdesc.descriptor(), Ddesc.descriptor(), "
    "preference.descriptor(), 1, &heuristicResult, &returnedResult)`"
)
TRAPPED = (
    "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in the CUDA documentation.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call."
)
# the products that run natively on a GPU of each kind, with a PyTorch 2.13 for CUDA 13.0
DENSE, GROUPS = {"tensorwise", "rowwise"}, {"rowwise groups, ours", "blockwise groups"}
SMALL_BLOCKS = {"mx", "nvfp4", "blockwise, powers of two"}
RUN = {
    "rtx4090": DENSE | GROUPS,
    "h200": DENSE | GROUPS | {"blockwise", "rowwise groups"},
    "b200": DENSE | GROUPS | SMALL_BLOCKS | {"mx groups", "nvfp4 groups"},
    "b300": DENSE | GROUPS | SMALL_BLOCKS | {"mx groups", "nvfp4 groups"},
    "rtx5090": DENSE | GROUPS | SMALL_BLOCKS | {"scaled by MX"},
    "gb10": DENSE | GROUPS | SMALL_BLOCKS,
    "mi355x": DENSE,
    "rx9070": DENSE,
}


@pytest.fixture
def in_process(monkeypatch):
    """The processes that products run in are this one; returns the number of processes that were started."""
    started = []

    def product_processes(*options):
        options = [each for each in options if each != "--interpret"]  # seconds; a test below does

        def run(cases):
            started.append(len(cases))
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = doctor_product_process.main([*options, *map(str, cases)])
            return out.getvalue(), "", code

        return run

    monkeypatch.setattr(doctor_products, "_product_processes", product_processes)
    return started


def faulty(monkeypatch, name, wrong):
    """Let the GPU's product with this name give ``wrong(right result, *args)``."""
    right = PRODUCTS[name]
    monkeypatch.setitem(PRODUCTS, name, lambda *args, **kwargs: wrong(right(*args, **kwargs), *args))


@pytest.mark.parametrize("gpu", RUN)
def test_a_gpu_of_each_kind_runs_what_its_table_says(gpu, in_process, capsys):
    assert main(["doctor", "--gpu", gpu, "--products", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["products"]
    assert found["name"] == GPUS[gpu].name
    assert {each["verdict"] for each in found["products"]} == {"ok", "not supported"}
    assert {each["product"] for each in found["products"] if each["verdict"] == "ok"} == RUN[gpu]
    assert all(each["detail"] for each in found["products"] if each["verdict"] == "not supported")
    assert in_process == [sum(each["verdict"] == "ok" for each in found["products"])], "one process"


def test_a_gpu_with_other_formats_runs_no_product(in_process, capsys):
    assert main(["doctor", "--gpu", "mi300x", "--products", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["products"]
    assert {each["verdict"] for each in found["products"]} == {"not supported"}
    assert all("which use e4m3fnuz and e5m2fnuz" in each["detail"] for each in found["products"])
    assert in_process == [], "and no process is started"


def shown(monkeypatch, capsys, gpu):
    """The tables of products that doctor prints at 80 columns, and its exit code."""
    monkeypatch.setenv("COLUMNS", "80")
    code = main(["doctor", "--gpu", gpu, "--products"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    return out[out.index("GEMMs on ") :], code


def test_wrong_bits_nan_errors_and_traps_are_told_apart(in_process, monkeypatch, capsys):
    monkeypatch.setattr(doctor_product_process, "_is_lost", lambda device: True)  # asked after an error only

    def wrong(result, gpu, a, b, scale, *rest):
        # PyTorch 2.10 to 2.13 did so, pytorch#187569; only 2.15 multiplies rows into float16 by itself
        if result.dtype == torch.float16 and scale.numel() == 1:
            return result.bfloat16().view(torch.float16)
        return torch.full_like(result, torch.nan) if b.dtype == torch.float8_e5m2 else result

    def trapped(result, *args):
        raise torch.AcceleratorError(TRAPPED)

    faulty(monkeypatch, "_scaled_mm", wrong)
    faulty(monkeypatch, "grouped_blockwise_mm", trapped)
    printed, code = shown(monkeypatch, capsys, "rtx4090")
    assert code == 1
    assert len(in_process) == 4, "each of two products takes two processes along"
    table, lines = printed.split("\n\n")[:2]
    cells = [re.split("  +", line) for line in table.splitlines()[4:] if line[0] not in "[ "]
    verdicts = {product: verdict for product, *_, verdict in cells}
    assert verdicts["tensorwise"] == "5 DIFFERS"
    assert verdicts["rowwise"] == "ok"
    assert verdicts["rowwise groups, ours"] == "2 GPU FAILED, 18 NOT RUN"
    assert verdicts["blockwise groups"] == "2 GPU FAILED, 13 NOT RUN"
    assert verdicts["mx"].startswith("not supported [")
    assert_expected_inline(
        lines,
        """\
supported GEMMs that failed, or returned different bits
Please send these lines, with the versions and devices above:
  https://github.com/fp8compile/fp8compile/issues/new?template=gpu.yml
GEMM        case                  answer
----------  --------------------  ----------------------------------------------
tensorwise  e4m3 allxall by e5m2  DIFFERS: every element is NaN
            allxall to bf16
tensorwise  e4m3 allxall by e5m2  DIFFERS: every element is NaN
            allxall to bf16,
            fast accumulation
tensorwise  e4m3 allxall by e4m3  DIFFERS: 7372 of 7680 elements are wrong; the
            allxall to fp16       first, at [0, 0], is -1.9375, expected -1.5
tensorwise  e4m3 allxall by e4m3  DIFFERS: 7372 of 7680 elements are wrong; the
            allxall to fp16,      first, at [0, 0], is -1.9375, expected -1.5
            fast accumulation
tensorwise  e4m3 1xall by e5m2    DIFFERS: every element is NaN
            allx1 to bf16
rowwise     e4m3 1xall by e4m3    GPU FAILED: AcceleratorError: CUDA error:
groups,     allx1 to bf16         unspecified launch failure Search for
ours                              `cudaErrorLaunchFailure' in the CUDA
                                  documentation. CUDA kernel errors might be
                                  asynchronously reported at some other API
                                  call. (after this, the GPU did no more work
                                  for this process)
rowwise     e5m2 1xall by e4m3    GPU FAILED: AcceleratorError: CUDA error:
groups,     allx1 to bf16         unspecified launch failure Search for
ours                              `cudaErrorLaunchFailure' in the CUDA
                                  documentation. CUDA kernel errors might be
                                  asynchronously reported at some other API
                                  call. (after this, the GPU did no more work
                                  for this process)
blockwise   e4m3 1x128 by e4m3    GPU FAILED: AcceleratorError: CUDA error:
groups      128x1 to bf16         unspecified launch failure Search for
                                  `cudaErrorLaunchFailure' in the CUDA
                                  documentation. CUDA kernel errors might be
                                  asynchronously reported at some other API
                                  call. (after this, the GPU did no more work
                                  for this process)
blockwise   e5m2 1x128 by e4m3    GPU FAILED: AcceleratorError: CUDA error:
groups      128x1 to bf16         unspecified launch failure Search for
                                  `cudaErrorLaunchFailure' in the CUDA
                                  documentation. CUDA kernel errors might be
                                  asynchronously reported at some other API
                                  call. (after this, the GPU did no more work
                                  for this process)""",
    )
    assert "crashed their process" not in lines


def test_a_product_that_a_library_refuses_is_reported_with_its_message(in_process, monkeypatch, capsys):
    def refused(result, *args):
        raise RuntimeError(NOT_SUPPORTED)

    faulty(monkeypatch, "nvfp4_mm", refused)
    printed, code = shown(monkeypatch, capsys, "b200")
    assert code == 1
    assert len(in_process) == 1, "the GPU still works for this process"
    assert "6 GPU FAILED" in printed
    flat = " ".join(printed.split())
    assert "GPU FAILED: RuntimeError: CUDA error:" in flat
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in flat
    assert "issues/new?template=gpu.yml" in flat


def test_scales_of_other_rows_are_found(in_process, monkeypatch, capsys):
    right = PRODUCTS["_scaled_mm"]

    def rolled(gpu, a, b, scale_a, *rest, **options):
        scale_a = scale_a.roll(1, 0) if scale_a.ndim == 2 and scale_a.shape[1] == 1 else scale_a
        return right(gpu, a, b, scale_a, *rest, **options)

    monkeypatch.setitem(PRODUCTS, "_scaled_mm", rolled)
    assert main(["doctor", "--gpu", "h200", "--products", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["products"]
    assert {each["product"] for each in found["products"] if each["verdict"] == "differs"} == {"rowwise"}


# ---------------------------------------------------------------------------------- processes that end


def answers(how, at):
    run = doctor_products.processes([sys.executable, str(DYING), how, str(at)])
    return doctor_products.asked_products(Target("cuda", (9, 0)), run)


def test_a_process_that_aborts_takes_two_cases_of_a_product_along_and_no_other_product():
    first = next(at for at, case in enumerate(product_cases()) if case.product == "blockwise groups")
    of_product = {}
    for each in answers("abort", first):
        of_product.setdefault(each.product, []).append(each)
    lost = of_product["blockwise groups"]
    assert [each.verdict for each in lost[:3]] == ["gpu failed", "gpu failed", "not run"]
    assert lost[0].detail == (
        "crashed its process (signal SIGABRT): Arch conditional MMA instruction used without targeting appropriate "
        "compute capability."
    )
    assert {each.verdict for each in of_product["rowwise"]} == {"ok"}


def test_a_case_that_does_not_end_is_said_to_and_the_next_ones_run():
    found = answers("hang", 3)
    assert (found[3].verdict, found[3].detail) == ("gpu failed", "did not finish within 60 s")
    assert {each.verdict for each in found[:3] + found[4:]} == {"ok", "not supported"}


def test_a_process_that_cannot_start_is_an_answer_too():
    found = answers("start", 0)
    assert {each.verdict for each in found} == {"gpu failed", "not supported"}
    assert found[0].detail == "crashed its process (exit code 1): ModuleNotFoundError: no module named 'torch'"
    assert not doctor_products.are_in_order([{"products": [{"verdict": each.verdict} for each in found]}])


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter")
def test_our_triton_kernels_of_groups_are_interpreted(capsys):
    """A case of each kind of scales and sums; `doctor --gpu` plays all of them."""
    wanted = {}
    for number, case in enumerate(product_cases()):
        if case.gemm.calls == ("grouped_blockwise_mm",):
            wanted[case.product, case.over_tokens, case.b.block] = number
    assert len(wanted) == 7
    from fp8compile.kernels import grouped_blockwise_mm as kernels

    with mock.patch.object(kernels, "multiply_rows", wraps=kernels.multiply_rows) as rows:
        assert doctor_product_process.main(["--gpu", "rtx5090", "--interpret", *map(str, wanted.values())]) == 0
    assert rows.call_count == 4
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line.removeprefix(doctor_product_process.LINE))["verdict"] for line in lines[1::2]] == [
        "ok"
    ] * 7


def test_a_process_of_its_own_answers():
    run = doctor_products._product_processes("--gpu", "rtx4090")
    out, _, code = run([0, 18])
    said = [json.loads(line.removeprefix(doctor_product_process.LINE)) for line in out.splitlines()]
    assert code == 0
    assert [line.get("verdict", line.get("begin")) for line in said] == [0, "ok", 18, "ok"]


# ---------------------------------------------------------------------------------- the command


def test_each_kind_of_gpu_of_a_machine_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(
        doctor_products, "_asked", lambda target, *options: asked.append((target.capability, *options)) or []
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    devices = [{"device": "cpu"}, *({"device": f"cuda:{at}", "name": name} for at, name in enumerate("AAB"))]
    assert [entry["name"] for entry in doctor_products.found_products(devices)] == ["A", "B"]
    assert asked == [((12, 0), "--device", "cuda:0"), ((12, 0), "--device", "cuda:2")]


def test_a_machine_without_a_gpu_is_asked_nothing_and_an_answer_decides_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_checks", lambda: iter([{"name": "left out", "ok": True, "detail": "slow"}]))
    assert main(["doctor"]) == 0
    assert "products on" not in capsys.readouterr().out
    wrong = {"product": "mx", "case": "e4m3", "verdict": "differs", "detail": "1 element"}
    found = [{"device": "cuda:0", "name": "NVIDIA B200", "products": [wrong]}]
    monkeypatch.setattr(doctor, "_products", lambda devices: found)
    assert main(["doctor"]) == 1
    assert "GEMMs on NVIDIA B200, cuda:0" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["products"] == found


def test_products_of_no_gpu_are_refused(capsys):
    assert main(["doctor", "--products"]) == 2
    assert "--products requires --gpu NAME" in capsys.readouterr().err
