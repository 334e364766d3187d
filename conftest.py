"""What all tests share: bit-exact comparison, one thread a worker, a compiler that forgets between tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
import tomllib
from pathlib import Path

import pytest
import torch
from cheap_compiles import make_compiles_cheap

from fp8compile.tables import LOG_WIDTH
from fp8compile.testing.bits import difference

pytest_plugins = ["pytester"]

# xdist runs a worker a core; the tests' tensors are small
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inductor takes the CPU's instructions from /proc/cpuinfo; else it also compiles four programs for each cache folder
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Not the user's cache: what an earlier version of the code left there must not decide. Workers share the first one's.
if "FP8COMPILE_TEST_CACHE" not in os.environ:
    cache = tempfile.mkdtemp(prefix="fp8compile-test-inductor-")
    os.environ["FP8COMPILE_TEST_CACHE"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    atexit.register(shutil.rmtree, cache, ignore_errors=True)


def _assert_bits_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    words = difference(actual, expected)
    assert words is None, f"{what}: {words}"


@pytest.fixture(scope="session", autouse=True)
def width():
    """Tables are as wide as where there is no terminal, whatever the terminal is that tests are started in."""
    os.environ["COLUMNS"] = str(LOG_WIDTH)


@pytest.fixture(scope="session")
def assert_bits_equal():
    """``assert_bits_equal(actual, expected, what)``: same dtype, shape, bits; names the first element that differs."""
    return _assert_bits_equal


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test starts with no compiled graph, no counter and the same random numbers."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def pytest_collection_finish():
    gc.collect()
    make_compiles_cheap()


FULL_ONLY = {
    line
    for group in tomllib.loads(Path(__file__).with_name("tests").joinpath("full_only.toml").read_text())["left_out"]
    for line in group["tests"]
}


def _mark_full_only(config, items):
    """Mark what only the full run runs; a line that names no test of a file that was collected whole is an error."""
    found = set()
    for item in items:
        named = FULL_ONLY & {item.nodeid, item.nodeid.partition("[")[0]}
        if named:
            item.add_marker(pytest.mark.slow)
            found |= named
    chosen = any("::" in arg for arg in config.args)
    files = {item.nodeid.partition("::")[0] for item in items}
    stale = [line for line in FULL_ONLY - found if line.partition("::")[0] in files]
    if stale and not chosen:
        raise pytest.UsageError(f"tests/full_only.toml names tests that are not there: {', '.join(sorted(stale))}")


def pytest_collection_modifyitems(config, items):
    _mark_full_only(config, items)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < (8, 9):
        found = "none" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(
                    pytest.mark.skip(reason=f"needs a GPU of compute capability 8.9 or more, found {found}")
                )
