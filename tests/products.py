"""Write the table of the full product of `test_tensor_parallel.py` into docs, from a run of it.

    python tests/products.py [--minutes N]

Within so many minutes, the cheap ways first: what the run did not get to is not in the table, which says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import test_tensor_parallel as cases
from gloo_ranks import shared_ranks

TABLE = Path(__file__).parents[1] / "docs" / "product-tensor-parallel.md"
WAYS = {(None, 2): "eager, 2", (None, 3): "eager, 3", ("aot_eager", 2): "aot_eager, 2", ("inductor", 2): "Inductor, 2"}
HEAD = """# Tensor parallel: the full product

Written by `tests/products.py`. A layer on ranks beside the same layer in one process: its output, the gradients of
input, weight and bias, and the state of delayed scaling. Columns are modes and how many ranks.

- *same bits*: all of them have the same bits.
- *n roundings: y*: all others have; y is a sum over ranks, and within n bfloat16 roundings of the magnitudes of its
  terms. *x*, *weight* and *bias* stand for their gradients.
- *not run*: the run ended before."""


def outcome(case):
    """Of one case on all of its ranks, in words, and whether it is as it has to be."""
    answers = shared_ranks().run(cases.outcome, *case, seconds=600)[: case[-1]]
    wrong = [f"rank {rank}: {words}" for rank, (words, _) in enumerate(answers) if words]
    if wrong:
        return "**" + "; ".join(wrong).replace("|", "/") + "**", False
    sums = answers[0][1]
    return (f"{cases.roundings(case[-1])} roundings: {', '.join(sums)}" if sums else "same bits"), True


def run(minutes):
    """Outcomes of as many cases as the time allows."""
    ends, found = time.monotonic() + 60 * minutes, {}
    order = sorted(cases.EVERYTHING, key=lambda case: list(WAYS).index(case[3:]))
    for case in order:
        if time.monotonic() > ends:
            break
        found[case] = outcome(case)
        if not found[case][1]:
            print(*case, found[case][0], flush=True)
    return found


def table(found):
    """The page."""
    lines = ["| recipe | layout | shape | " + " | ".join(WAYS.values()) + " |", "|---" * (3 + len(WAYS)) + "|"]
    for row in dict.fromkeys(case[:3] for case in cases.EVERYTHING):
        cells = [found.get((*row, *way), ("not run", True))[0] for way in WAYS]
        lines.append("| " + " | ".join((*row, *cells)) + " |")
    shapes = ", ".join(f"{name} x {x}, {n} features out" for name, (x, n) in cases.SHAPES.items())
    counts = [sum(case[3:] == way for case in found) for way in WAYS]
    ran = "; ".join(
        f"{name} {n} of {len(cases.EVERYTHING) // len(WAYS)}" for name, n in zip(WAYS.values(), counts, strict=True)
    )
    wrong = sum(not is_right for _, is_right in found.values())
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    verdict = f"Run on {when}, PyTorch {torch.__version__}, on a CPU: {ran}. {wrong} differ otherwise than they may."
    return "\n\n".join([HEAD, verdict, f"Shapes: {shapes}.", "\n".join(lines)]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    outcomes = run(parser.parse_args().minutes)
    TABLE.write_text(table(outcomes))
    sys.exit(any(not is_right for _, is_right in outcomes.values()))
