"""Write docs/results/gpu-programs.md: every case of generated programs, and every planted fault, from a run.

    python compile_tests/gpu_programs_table.py [--quick] [--tables models functions planted] [--only WORDS]

All cases take half an hour of a processor's time; ``--quick`` runs what the tests run each time. The page has a part
for each version of PyTorch. A row that isn't run again stays as it was. The exit status is 1 if a row shows a
difference, an error or a fault that wasn't found.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import torch
import triton
from foreign_functions import FOREIGN, has_package
from gpu_program_cases import CASES, Case, Row, check
from planted_faults import FAULTS, LIBRARY_FAULT, found, found_in_library

PAGE = Path(__file__).parents[1] / "docs" / "results" / "gpu-programs.md"
PART = "## PyTorch {torch}, Triton {triton}"
HEAD = """# Programs for a GPU, run without one

Written by `python compile_tests/gpu_programs_table.py`.

Models are compiled for an H200 (mxfp8 and nvfp4: a B200) and run forward and backward by
`run_gpu_program`, twice.
"Graph": as users get it, every product's operands and every output of each graph against the same
graph, operator by operator; the number of tensors that differ. "Eager": with Inductor's
`emulate_precision_casts`, outputs, gradients and buffers against eager mode on the CPU; the number of
elements that differ. Both compare bits. Seconds are of one processor, both ways together.

Faults are planted one at a time, in the code of a layer behind an activation.
"""
MODELS, FUNCTIONS, PLANTED = "### Models", "### Functions that nobody here wrote", "### Planted faults"
CHECKED = "| {} | products | kernels | graph | eager | seconds |\n|---|---|---|---|---|---|"
TABLES = {  # by their headings
    MODELS: CHECKED.format("model and recipe"),
    FUNCTIONS: CHECKED.format("function"),
    PLANTED: "| planted | what the run says |\n|---|---|",
}
WORDS = {"models": MODELS, "functions": FUNCTIONS, "planted": PLANTED}
Part = dict[str, dict[str, str]]  # heading, first cell, row


def read_parts() -> dict[str, Part]:
    """The rows of the page as it is, by version, table and first cell."""
    parts: dict[str, Part] = {}
    rows: dict[str, str] = {}
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        if line.startswith("## PyTorch "):
            part = parts[line] = {heading: {} for heading in TABLES}
        elif line in TABLES and parts:
            rows = part[line]
        elif line.startswith("| ") and parts and not any(table.startswith(line) for table in TABLES.values()):
            rows[line.split(" | ")[0].removeprefix("| ")] = line
    return parts


def write_parts(parts: dict[str, Part], order: Sequence[str]) -> None:
    """Write the page; rows in the order of the cases."""
    text = HEAD
    for version in sorted(parts):
        text += f"\n{version}\n"
        for heading, rows in parts[version].items():
            if rows:
                kept = "\n".join(rows[name] for name in order if name in rows)
                text += f"\n{heading}\n\n{TABLES[heading]}\n{kept}\n"
        if left := [str(case) for case in CASES if str(case) not in parts[version][MODELS]]:
            text += f"\nNot run on this version: {'; '.join(left)}.\n"
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)


# ---------------------------------------------------------------------------------- in other processes


def checked(case_name: str) -> Row | str:
    """A case's row, or its error."""
    warnings.simplefilter("ignore")
    case = next(each for each in (*CASES, *FOREIGN) if str(each) == case_name)
    try:
        return check(case)
    except Exception as error:
        return _said(error)


def planted(fault_name: str) -> str:
    """What a run says of a fault, or "nothing"."""
    warnings.simplefilter("ignore")
    if fault_name == LIBRARY_FAULT:
        return found_in_library()[1]
    return found(next(each for each in FAULTS if each.name == fault_name)).splitlines()[0]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0].replace("|", "/")


# ---------------------------------------------------------------------------------- rows


def checked_row(name: str, result: Row | str) -> tuple[str, bool]:
    """A line of the page, and whether it is as it should be."""
    if isinstance(result, str):
        return f"| {name} | raised `{result}` | | | | |", False
    differs = sum(result.from_eager.values())
    cells = (name, result.products, result.kernels, len(result.from_graph), differs, f"{result.seconds:.0f}")
    return f"| {' | '.join(map(str, cells))} |", not result.from_graph and not differs


def planted_row(name: str, said: str) -> tuple[str, bool]:
    """A line of the page, and whether the fault was found."""
    return f"| {name} | `{said.replace('|', '/')}` |", said != "nothing"


Work = tuple[str, str, Callable, Callable]  # heading, name, what runs elsewhere, what makes a row of its result
Result = tuple[str, str, str, bool]  # heading, name, row, whether it is as it should be


def all_work(*, quick: bool, tables: Sequence[str], only: str) -> tuple[list[Work], list[Work]]:
    """What is to be run, and what of that needs a group of ranks that isn't there."""
    cases = [case for case in CASES if case.is_quick or not quick]
    models = {str(case): (MODELS, str(case), checked, checked_row) for case in cases if only in str(case)}
    in_ranks = {str(case) for case in cases if case.in_ranks}
    functions: list[Case] = [case for case in FOREIGN if only in str(case) and has_package(case)]
    faults = [name for name in (*(fault.name for fault in FAULTS), LIBRARY_FAULT) if only in name]
    everything = [
        *(work for name, work in models.items() if name not in in_ranks),
        *((FUNCTIONS, str(case), checked, checked_row) for case in functions),
        *((PLANTED, name, planted, planted_row) for name in faults),
    ]
    apart = [work for name, work in models.items() if name in in_ranks]
    return [work for work in everything if work[0] in tables], [work for work in apart if work[0] in tables]


def start_fake_group() -> None:
    """Be one of two ranks, of which the other is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())


def results(
    work: Sequence[Work], processes: int, initializer: Callable | None
) -> Iterator[tuple[str, str, str, bool]]:
    """Each table's heading, first cell and row, and whether it is good."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=initializer) as pool:
        futures: list[Future] = [pool.submit(run, name) for _, name, run, _ in work]
        for (heading, name, _, make_row), future in zip(work, futures, strict=True):
            error = future.exception()  # of a process that died, too
            row, good = checked_row(name, _said(error)) if error else make_row(name, future.result())
            yield heading, name, row, good


def main() -> None:
    """Run all, print each as it is done, write the page after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="only what the tests run each time")
    parser.add_argument("--tables", nargs="+", choices=[*WORDS], default=[*WORDS], help="only these")
    parser.add_argument("--only", default="", metavar="WORDS", help="only rows in whose first cell these words are")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    order = [str(case) for case in (*CASES, *FOREIGN)] + [fault.name for fault in FAULTS] + [LIBRARY_FAULT]
    parts = read_parts()
    version = PART.format(torch=torch.__version__.partition("+")[0], triton=triton.__version__)
    part = parts.setdefault(version, {heading: {} for heading in TABLES})
    alone, in_ranks = all_work(quick=options.quick, tables=[WORDS[each] for each in options.tables], only=options.only)
    is_good = True
    for work, initializer in ((alone, None), (in_ranks, start_fake_group)):
        for heading, name, row, good in results(work, options.processes, initializer):
            print(row, flush=True)
            part[heading][name] = row
            is_good &= good
            write_parts(parts, order)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
