"""A long run of the fuzzer: `python tests/fuzz/long_run.py --cases 10000 --seed 1`. Ends with 1 if a case failed.

Prints a table of what it ran: cases of each property, and of each class in it.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from properties import PROPERTIES  # noqa: E402  (needs the paths)
from run import run  # noqa: E402


def _bit_exact_comparison() -> Callable[..., None]:
    """That of the tests; with it their settings: one thread, a compile cache of their own."""
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    return conftest._assert_bits_equal


def _print_counts(name: str, counts: Counter[str], seconds: float) -> None:
    print(f"{counts['cases']:7,}  {name}  ({seconds:.0f} s)")
    classes = [(label, count) for label, count in counts.most_common() if label != "cases"]
    shown = ", ".join(f"{label} {count:,}" for label, count in classes[:24])
    print(f"         {shown}{', ...' if len(classes) > 24 else ''}", flush=True)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="in all, spread over the properties")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="properties whose name has this in it")
    arguments = parser.parse_args()
    faulthandler.enable()  # should a kernel crash the process: where
    warnings.simplefilter("ignore")
    same = _bit_exact_comparison()
    import torch

    print(f"torch {torch.__version__}, seed {arguments.seed}", flush=True)
    total, failures = 0, []
    for name, prop in PROPERTIES.items():
        if arguments.only not in name:
            continue
        started = time.perf_counter()
        torch._dynamo.reset()
        try:
            counts = run(prop, max(1, round(arguments.cases * prop.share)), same, arguments.seed)
        except Exception:
            failures.append(name)
            print(f"FAILED   {name}\n{traceback.format_exc()}", flush=True)
        else:
            total += counts["cases"]
            _print_counts(name, counts, time.perf_counter() - started)
    print(f"{total:7,}  cases in all, {len(failures)} of the properties failed: {', '.join(failures) or 'none'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
