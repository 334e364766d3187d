"""Does FP8 train as well as bf16? Level, spread and gap for each recipe, and for a planted fault.

    python benchmarks/train_criterion.py [recipe ...]

Runs the default preset of `fp8compile train`: bf16 on three seeds, then each recipe, then a recipe
with a wrong scale. See fp8compile/cli/train/criterion.py for what the words mean. Exit code 1 unless
every recipe passes and the fault does not.
"""

from __future__ import annotations

import sys
import time

import fp8compile as f8
from fp8compile.cli.train.config import TrainConfig
from fp8compile.cli.train.criterion import Verdict, baseline, final_loss, plant_wrong_scale
from fp8compile.cli.train.text import load_text
from fp8compile.cli.train.training import resolved

# Each is one operand of the first two GEMMs; grad_weight's cannot show, as criterion.py says.
PLANTED_SLOTS = ("weight", "grad_output")


def main(names: list[str]) -> int:
    """Run the criterion and print a line for each training.

    Args:
        names: Recipes; all that there are if empty.

    Returns:
        The exit code.
    """
    config = resolved(TrainConfig())
    text = load_text(None, batch=config.batch, seq=config.seq)
    start = time.perf_counter()
    reference = baseline(config, text)
    print(f"{reference}  [{time.perf_counter() - start:.0f} s]", flush=True)
    names = names or list(f8.recipes.names())
    cases = [(name, f8.recipes.by_name(name), True) for name in names]
    for slot in PLANTED_SLOTS:
        wrong = plant_wrong_scale(f8.recipes.by_name(names[0]), slot)
        cases.append((f"{names[0]}, wrong scale of {slot}", wrong, False))
    as_expected = True
    for name, recipe, should_pass in cases:
        start = time.perf_counter()
        loss = final_loss(config, text, recipe, seed=config.seed)
        verdict = Verdict(name=name, loss=loss, baseline=reference)
        print(f"{verdict}  [{time.perf_counter() - start:.0f} s]", flush=True)
        as_expected &= verdict.passed == should_pass
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
