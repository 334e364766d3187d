"""Write docs/results/gpu-programs.md: every case of generated programs, and every planted fault, from a run.

    python compile_tests/gpu_programs_table.py [--quick]

It takes about half an hour of a processor's time; ``--quick`` runs what the tests run each time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton
from gpu_program_cases import CASES, Row, check, start_fake_group
from planted_faults import FAULTS, LIBRARY_FAULT, found, found_in_library

PAGE = Path(__file__).parents[1] / "docs" / "results" / "gpu-programs.md"
HEAD = """# Programs for a GPU, run without one

Written by `python compile_tests/gpu_programs_table.py`; PyTorch {torch}, Triton {triton}.

## Models

Each is compiled for an H200 (mxfp8: a B200) and run forward and backward by `run_gpu_program`, twice.
"Graph": as users get it, every product's operands and every output of each graph against the same
graph, operator by operator; the number of tensors that differ. "Eager": with Inductor's
`emulate_precision_casts`, outputs, gradients and buffers against eager mode on the CPU; the number of
elements that differ. Both compare bits. Seconds are of one processor.

| model and recipe | products | kernels | graph | eager | seconds |
|---|---|---|---|---|---|
"""
FAULTS_HEAD = """
## Planted faults

One at a time, in the code of a layer behind an activation.

| planted | what the run says |
|---|---|
"""


def _checked(number: int) -> Row:
    return check(CASES[number])


def _rows(numbers: Iterable[int]) -> Iterator[Row]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=start_fake_group) as pool:
        for number in numbers:
            in_ranks = CASES[number].in_ranks
            yield pool.submit(_checked, number).result() if in_ranks else _checked(number)


def _line(row: Row) -> str:
    differs = sum(row.from_eager.values())
    return f"| {row.case} | {row.products} | {row.kernels} | {len(row.from_graph)} | {differs} | {row.seconds:.0f} |\n"


def main() -> None:
    """Run all, print each as it is done, write the page."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only what the tests run each time")
    quick = parser.parse_args().quick
    page = HEAD.format(torch=torch.__version__.partition("+")[0], triton=triton.__version__)
    bad: list[str] = []
    for row in _rows(number for number, case in enumerate(CASES) if case.is_quick or not quick):
        print(_line(row), end="", flush=True)
        page += _line(row)
        bad += [f"{row.case}: {line}" for line in (*row.from_graph, *map(str, row.from_eager.items()))]
    page += FAULTS_HEAD
    for fault in FAULTS:
        said = found(fault).splitlines()[0]
        page += f"| {fault.name} | `{said}` |\n"
        bad += [f"not found: {fault.name}"] if said == "nothing" else []
    said = found_in_library()[1]
    page += f"| {LIBRARY_FAULT} | `{said}` |\n"
    bad += [f"not found: {LIBRARY_FAULT}"] if said == "nothing" else []
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page)
    sys.exit("\n".join(bad) or None)


if __name__ == "__main__":
    main()
