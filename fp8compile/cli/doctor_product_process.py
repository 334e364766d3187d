"""Subprocess of `fp8compile doctor` that runs test GEMMs on a GPU; a crash there does not end doctor.

It prints a line before and a line after each case, so that the parent knows during which case the process died.

    python -m fp8compile.cli.doctor_product_process --device cuda:0 CASE...
    python -m fp8compile.cli.doctor_product_process --gpu rtx5090 [--interpret] CASE...

A CASE is a position in `fp8compile.cli.self_test_cases.product_cases()`. With ``--gpu``, the CPU
simulates the GPU; with ``--interpret``, our Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fp8compile.cli.self_test_cases import ProductCase, product_cases

__all__ = ["LINE", "SECONDS", "answer", "main"]

LINE = "fp8compile-product "  # begins each line for the parent; libraries may print other lines
SECONDS = 60  # for one case, in which our Triton kernels are compiled too
LONGEST = 300  # characters of an error


def _difference(result: torch.Tensor, expected: torch.Tensor) -> str:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"got {result.dtype} {tuple(result.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    if result.isnan().all():
        return "every element is NaN"
    wrong = (result != expected).nonzero().tolist()
    first = tuple(wrong[0])
    return (
        f"{len(wrong)} of {result.numel()} elements are wrong; the first, at {wrong[0]}, is "
        f"{result[first].item():g}, expected {expected[first].item():g}"
    )


def answer(case: ProductCase, device: torch.device) -> tuple[str, str]:
    """Run a test GEMM once and compare it with the exact result; return a verdict and a detail.

    The verdict is ``"ok"``, ``"differs"`` or ``"raised"``; the detail is the difference or the error, or empty.
    """
    try:
        result = case.result(device)
    except Exception as error:  # whatever PyTorch, a library or Triton says is the answer
        return "raised", f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"
    expected = case.expected()
    # equal as numbers: a sum of zeros may be 0 or -0
    same = result.shape == expected.shape and result.dtype == expected.dtype and torch.equal(result, expected)
    return ("ok", "") if same else ("differs", _difference(result, expected))


def _is_lost(device: torch.device) -> bool:
    """Whether a small operator fails on a device, as it does after a kernel that trapped."""
    try:
        return torch.ones(1, device=device).add(1).item() != 2
    except Exception:  # PyTorch has several classes for it
        return True


def _say(**line: Any) -> None:
    print(LINE + json.dumps(line), flush=True)


def _setting(gpu: str | None, *, interpret: bool) -> AbstractContextManager[None]:
    if gpu is None:
        return nullcontext()
    from fp8compile.testing.gpu.gpus import gpu_called
    from fp8compile.testing.gpu.program.simulated import simulated_products

    return simulated_products(gpu_called(gpu), interpret=interpret)


def main(arguments: list[str] | None = None) -> int:
    """Run the test GEMMs that the command line names, one after the other; return the exit code.

    The process ends early, with exit code 1, if the GPU is lost or if a case takes more than `SECONDS`.
    """
    parser = argparse.ArgumentParser(description="Run each GEMM of a GPU once, for `fp8compile doctor`.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpu")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("cases", nargs="+", type=int)
    parsed = parser.parse_args(arguments)
    device, cases = torch.device(parsed.device), product_cases()
    with _setting(parsed.gpu, interpret=parsed.interpret):
        for number in parsed.cases:
            _say(begin=number)
            faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__ or 2)
            verdict, detail = answer(cases[number], device)
            faulthandler.cancel_dump_traceback_later()
            lost = verdict == "raised" and _is_lost(device)
            _say(case=number, verdict=verdict, detail=detail, lost=lost)
            if lost:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
