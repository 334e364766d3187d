"""Runs every kind of GEMM ("product") on a GPU, and checks our tables of supported GEMMs.

    ok               equal to the exact result in each element, where 0 equals -0
    differs          not equal to it
    gpu failed       the table allows the GEMM on the GPU, but the GEMM raises, traps, or does not end
    not supported    not run, because the table does not allow the GEMM on the GPU
    not run          not run, because two other cases of the GEMM crashed their process

Cases run in other processes, because a kernel that traps destroys its process's CUDA context.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8compile.cli.doctor_product_process import LINE, SECONDS
from fp8compile.cli.section import Section
from fp8compile.cli.self_test_cases import product_cases
from fp8compile.tables import Cell, Note
from fp8compile.target import Target

__all__ = ["Answer", "are_in_order", "asked_products", "found_products", "played_on", "processes", "product_sections"]

log: logging.Logger = logging.getLogger(__name__)
OK, DIFFERS, SAYS_NO, REFUSED, NOT_ASKED = "ok", "differs", "gpu failed", "not supported", "not run"
MOST_LOST = 2  # processes that cases of one product may take along
LONGEST = 900  # seconds for a process, if its own limit of `SECONDS` a case fails
TIMED_OUT = "Timeout ("  # what faulthandler writes when it ends a process
SENTENCE = re.compile(r"\.(?= [A-Z])")
REPORT = "https://github.com/fp8compile/fp8compile/issues/new?template=gpu.yml"

# (cases) -> (output, last lines of errors, exit code): starts a process for cases and waits for its end
Runner = Callable[[Sequence[int]], tuple[str, str, int]]


@dataclass(frozen=True)
class Answer:
    """The result of one test GEMM on a GPU.

    Attributes:
        product: The kind of GEMM, a key of `gpu_support.PRODUCTS`.
        case: Formats, blocks and options.
        verdict: One of the verdicts in the table at the head of this file.
        detail: The difference, the error or the reason.
    """

    product: str
    case: str
    verdict: str
    detail: str = ""


def processes(command: Sequence[str]) -> Runner:
    """Make a function that runs cases, given by position in `product_cases`, in a subprocess ``command CASE...``."""

    def run(cases: Sequence[int]) -> tuple[str, str, int]:
        with subprocess.Popen(
            [*command, *map(str, cases)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            try:
                out, err = process.communicate(timeout=LONGEST)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                err += TIMED_OUT
            return out, err, process.returncode

    return run


def _product_processes(*options: str) -> Runner:
    return processes([sys.executable, "-m", "fp8compile.cli.doctor_product_process", *options])


def _end(code: int, out: str, err: str) -> str:
    if TIMED_OUT in err:
        return f"did not finish within {SECONDS} s"
    said = [line for line in (*out.splitlines(), *err.splitlines()) if line.strip() and not line.startswith(LINE)]
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return f"crashed its process ({how})" + (f": {' '.join(said[-1].split())[:200]}" if said else "")


def _answered(run: Runner, wanted: list[int]) -> Iterator[tuple[int, str, str]]:
    """Run test GEMMs and yield (case, verdict, detail) for each; after a crash, go on in a new process.

    ``wanted`` are the cases' positions in `product_cases`.
    """
    cases, lost = product_cases(), Counter[str]()
    while wanted:
        out, err, code = run(wanted)
        begun, done = None, 0
        for line in out.splitlines():
            _, ours, text = line.partition(LINE)  # a GPU's own messages may end without a new line
            if not ours:
                continue
            said: dict[str, Any] = json.loads(text)
            if "begin" in said:
                begun = said["begin"]
                continue
            begun, done = None, done + 1
            verdict = SAYS_NO if said["verdict"] == "raised" else said["verdict"]
            detail = said["detail"] + (
                " (after this, the GPU did no more work for this process)" if said["lost"] else ""
            )
            lost[cases[said["case"]].product] += said["lost"]
            yield said["case"], verdict, detail
        if begun is not None:
            lost[cases[begun].product] += 1
            done += 1
            yield begun, SAYS_NO, _end(code, out, err)
        if not done:  # it can't even start
            for number in wanted:
                yield number, SAYS_NO, _end(code, out, err)
            return
        wanted = wanted[done:]
        for number in [each for each in wanted if lost[cases[each].product] >= MOST_LOST]:
            wanted.remove(number)
            yield number, NOT_ASKED, f"{MOST_LOST} cases of {cases[number].product} crashed their process"


def asked_products(target: Target, run: Runner) -> list[Answer]:
    """Run all test GEMMs that the tables allow on a GPU; return a result for each, also for refused ones.

    ``run`` runs cases, given by position in `product_cases`, in another process.
    """
    cases = product_cases()
    refused = {number: reason for number, case in enumerate(cases) if (reason := case.refusal(target)) is not None}
    found = {number: (REFUSED, reason) for number, reason in refused.items()}
    log.info("running %d GEMMs; %d are not supported", len(cases) - len(refused), len(refused))
    for number, verdict, detail in _answered(run, [each for each in range(len(cases)) if each not in refused]):
        found[number] = verdict, detail
    return [Answer(case.product, str(case), *found[number]) for number, case in enumerate(cases)]


def _asked(target: Target, *options: str) -> list[dict[str, Any]]:
    return [asdict(each) for each in asked_products(target, _product_processes(*options))]


def found_products(devices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run all test GEMMs on one GPU of each model in this machine, given doctor's entries for all devices.

    Returns an entry for each model, with ``device``, ``name`` and ``products``, the results.
    """
    import torch

    from fp8compile.target import target_of

    first: dict[str, dict[str, Any]] = {}
    for entry in devices:
        if entry["device"] != "cpu":
            first.setdefault(entry.get("name", entry["device"]), entry)
    return [
        {
            "device": entry["device"],
            "name": name,
            "products": _asked(target_of(torch.device(entry["device"])), "--device", entry["device"]),
        }
        for name, entry in first.items()
    ]


def played_on(gpu: str) -> dict[str, Any]:
    """Run all test GEMMs for a GPU that the CPU simulates; return an entry like those of `found_products`.

    ``gpu`` is a key of `fp8compile.testing.gpu.gpus.GPUS`.
    """
    from fp8compile.testing.gpu.gpus import gpu_called

    known, options = gpu_called(gpu), ["--gpu", gpu]
    if importlib.util.find_spec("triton"):
        options.append("--interpret")
    return {"device": "simulated on the CPU", "name": known.name, "products": _asked(known.target, *options)}


def are_in_order(found: Sequence[dict[str, Any]]) -> bool:
    """Whether all results are "ok" or "not supported"; ``found`` comes from `found_products`."""
    return all(each["verdict"] in (OK, REFUSED) for entry in found for each in entry["products"])


# ---------------------------------------------------------------------------------- what is printed


def _row(product: str, answers: list[dict[str, Any]]) -> tuple[Cell, ...]:
    counts = Counter(each["verdict"] for each in answers)
    run = len(answers) - counts[REFUSED] - counts[NOT_ASKED]
    bad = [f"{counts[verdict]} {verdict.upper()}" for verdict in (DIFFERS, SAYS_NO, NOT_ASKED) if counts[verdict]]
    verdict: Cell = ", ".join(bad) or OK
    if not run:
        verdict = Note(SENTENCE.split(answers[0]["detail"])[0], REFUSED)  # the table of recipes has the advice
    return product, str(run), str(counts[OK]), str(counts[REFUSED]), verdict


def product_sections(found: Sequence[dict[str, Any]]) -> Iterator[Section]:
    """Yield a table for each entry of `found_products` and, if some results are wrong, a section for a bug report."""
    for entry in found:
        of_product: dict[str, list[dict[str, Any]]] = {}
        for each in entry["products"]:
            of_product.setdefault(each["product"], []).append(each)
        rows = [_row(*pair) for pair in of_product.items()]
        wrong = [each for each in entry["products"] if each["verdict"] not in (OK, REFUSED)]
        bad = {each["product"] for each in wrong}
        yield Section(
            title=f"GEMMs on {entry['name']}, {entry['device']}",
            lines=("Each GEMM runs once at a small size; its result must equal the exact one.",),
            columns=("GEMM", "run", "ok", "not supported", "verdict"),
            rows=rows,
            loud=frozenset(at for at, row in enumerate(rows) if row[0] in bad),
            numbers=(1, 2, 3),
        )
        if wrong:
            yield Section(
                title="supported GEMMs that failed, or returned different bits",
                lines=(f"Please send these lines, with the versions and devices above: {REPORT}",),
                columns=("GEMM", "case", "answer"),
                rows=[
                    (each["product"], each["case"], f"{each['verdict'].upper()}: {each['detail']}")
                    for each in wrong
                    if each["verdict"] != NOT_ASKED
                ],
            )
