"""Plays the process of `doctor`'s products by its lines alone, for tests of what the parent makes of its end.

python dying_process.py HOW AT CASE...     at case AT it aborts, hangs as far as faulthandler sees, or can't start
"""

from __future__ import annotations

import json
import os
import sys

how, at, cases = sys.argv[1], int(sys.argv[2]), list(map(int, sys.argv[3:]))
if how == "start":
    sys.exit("ModuleNotFoundError: no module named 'torch'")
for case in cases:
    print("fp8compile-product " + json.dumps({"begin": case}), flush=True)
    if case >= at and how == "abort":
        print("Arch conditional MMA instruction used without targeting appropriate compute capability.", flush=True)
        os.abort()
    if case == at and how == "hang":
        print("Timeout (0:01:00)!", file=sys.stderr)
        sys.exit(1)
    answer = {"case": case, "verdict": "ok", "detail": "", "lost": False}
    print("fp8compile-product " + json.dumps(answer), flush=True)
