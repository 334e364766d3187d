"""What all tests share: bit-exact comparison, one thread a worker, a compiler that forgets between tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

import pytest
import torch

from fp8compile.testing.bits import difference

pytest_plugins = ["pytester"]

# xdist runs a worker a core; the tests' tensors are small
torch.set_num_threads(1)
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
    """Have the garbage collector, a tenth of the time of tests that compile, look less often and not at what stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items):
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < (8, 9):
        found = "none" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(
                    pytest.mark.skip(reason=f"needs a GPU of compute capability 8.9 or more, found {found}")
                )
