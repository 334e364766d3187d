"""Eight minutes on a GPU that decide which kernels to change: each line is printed at once, the most valuable first.

    gemm, copies   is our grouped GEMM with float32 sums faster than PyTorch's, and what do transposing copies cost?
    casts          which casts run below half of a copy's bandwidth?
    spike          candidates of the grouped GEMM and of the cast, if their folder is there (--spikes)
    experts        the experts' step with each recipe, at 128 x 512 rows, 16 x 4096 (EP 8), 8 x 4096 (Mixtral) and
                   8 x 8192 (DeepSeek-V3)
    kernels        the kernels that take the time of the experts' step
    layer          a dense layer; then its kernels
    autotuned      the experts' step with Inductor's own race (max_autotune_gemm)

Each part is a process with a time limit: a part that fails, or lacks something, does not stop the others.

    python -m benchmarks.gpu_decide [--parts gemm casts ...] [--out FILE] [--spikes FOLDER] [--dry-run]

With --dry-run no GPU is needed: the same calls at tiny sizes on a CPU, which runs our kernels in an interpreter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["main"]

FLOAT8 = torch.float8_e4m3fn
E4M3 = (True, True)  # the formats of both operands
BLOCK = 128
# rows, dim, hidden, experts
EXPERTS = ((65536, 2048, 768, 128), (65536, 2048, 768, 16), (32768, 4096, 14336, 8), (65536, 7168, 2048, 8))
TINY = (64, 32, 32, 4)
PARTS = {  # seconds
    "gemm": 90, "copies": 30, "casts": 60, "spike": 90, "experts": 240, "kernels": 120, "layer": 240, "autotuned": 120,
}  # fmt: skip
COMMANDS = {  # parts that are other benchmarks, and their arguments in a dry run
    "kernels": (
        ["benchmarks.gpu_kernels", "--only", "experts", "--most", "20"],
        ["benchmarks.gpu_kernels", "--only", "optimizer", "--most", "3"],
    ),
    "layer": (
        [
            "benchmarks.gpu_step",
            "--only",
            "layer",
            "--contenders",
            "rowwise",
            "blockwise",
            "--kinds",
            "exact",
            "FSDP2",
        ],
        ["benchmarks.gpu_step", "--only", "optimizer", "--rounds", "1"],
    ),
}


def line(name: str, call: Callable[[], object], flops: float = 0.0, nbytes: float = 0.0) -> None:
    """Time a call and print a line; if it raises, print the error and go on."""
    from benchmarks.timing import milliseconds

    began = time.perf_counter()
    try:
        for _ in range(2):
            call()
        ms = milliseconds(call)
    except Exception as error:  # a missing kernel must not hide the others
        print(f"{name:58s} {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)
    else:
        rates = f"{flops / ms / 1e9:8.0f} TFLOP/s {nbytes / ms / 1e6:8.0f} GB/s"
        print(f"{name:58s} {ms:8.3f} ms {rates} ({time.perf_counter() - began:.0f} s)", flush=True)


def _codes(*shape: int) -> Tensor:
    from benchmarks.timing import device

    return torch.randint(0, 120, shape, dtype=torch.uint8, device=device())


def _offsets(rows: int, experts: int) -> Tensor:
    from benchmarks.timing import device

    torch.manual_seed(0)
    chosen = torch.multinomial(torch.rand(experts) + 0.1, rows, replacement=True)
    return torch.bincount(chosen, minlength=experts).cumsum(0).int().to(device())


def gemm(rows: int, dim: int, hidden: int, experts: int) -> None:
    """The four GEMMs whose rows are tokens, then the two gradients of weights."""
    from benchmarks.timing import device
    from fp8compile.kernels.grouped_blockwise_mm import multiply_rows, multiply_tokens

    offsets, bf16 = _offsets(rows, experts), {"dtype": torch.bfloat16, "device": device()}
    products = {"gate_up": (dim, 2 * hidden), "down": (hidden, dim), "grad down": (dim, hidden)}
    for name, (k, n) in (products | {"grad gate_up": (2 * hidden, dim)}).items():
        a, b, flops = _codes(rows, k), _codes(experts, n, k), 2.0 * rows * k * n
        of_a, of_b = torch.ones(rows, device=device()), torch.ones(experts, n, device=device())
        y = torch.empty(rows, n, **bf16)
        for fast in (True, False):
            operands = a.view(FLOAT8), b.view(FLOAT8).transpose(-2, -1), of_a, of_b, offsets
            options = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
            line(f"{name} ATen rowwise, fast={fast}", partial(torch._scaled_grouped_mm, *operands, **options), flops)
        line(
            f"{name} ours rowwise, float32 sums",
            multiply_rows(a, b, of_a[:, None], of_b[..., None], offsets, y, formats=E4M3, is_whole=True),
            flops,
        )
        tiles = torch.ones(-(-k // BLOCK), rows, device=device()).t()
        squares = torch.ones(experts, -(-n // BLOCK), -(-k // BLOCK), device=device())
        ours = multiply_rows(a, b, tiles, squares, offsets, y, formats=E4M3, is_whole=False)
        line(f"{name} ours blockwise", ours, flops)
        x, w = torch.randn(rows, k, **bf16), torch.randn(experts, n, k, **bf16)
        line(f"{name} bf16", partial(torch._grouped_mm, x, w.transpose(-2, -1), offs=offsets), flops)
    for name, n, k in (("wgrad gate_up", 2 * hidden, dim), ("wgrad down", dim, hidden)):
        for align, is_whole in ((16, True), (BLOCK, False)):
            columns = (rows + experts * (align - 1)) // BLOCK * BLOCK
            a, b = _codes(n, columns), _codes(k, columns)
            scales = [torch.ones(experts if is_whole else columns // BLOCK, size, device=device()) for size in (n, k)]
            d = torch.empty(experts, n, k, **bf16)
            line(
                f"{name} ours {'rowwise' if is_whole else 'blockwise'}",
                multiply_tokens(a, b, *scales, offsets, d, formats=E4M3, align=align, is_whole=is_whole),
                2.0 * rows * k * n,
            )


def copies(rows: int, dim: int, hidden: int, experts: int) -> None:
    """Transposing copies of FP8 weights, as a GEMM would make them of operands that are not contiguous."""
    for k, n in ((hidden, dim), (dim, 2 * hidden)):
        codes = _codes(experts, n, k).transpose(1, 2)
        line(f"transposing copy of codes {(experts, k, n)}", codes.contiguous, 0, 2.0 * codes.numel())


def casts(rows: int, dim: int, hidden: int, experts: int) -> None:
    """Our casts of groups and of weights, beside a copy."""
    from benchmarks.timing import device
    from fp8compile.quantizers import CurrentScaling

    ops, bf16 = torch.ops.fp8compile, {"dtype": torch.bfloat16, "device": device()}
    row, column, tile, strip, pillar = (
        CurrentScaling(block=block) for block in ((1, -1), (-1, 1), (BLOCK, BLOCK), (1, BLOCK), (BLOCK, 1))
    )
    offsets, x = _offsets(rows, experts), torch.randn(rows, dim, **bf16)
    weight, wide = torch.randn(experts * 2 * hidden, dim, **bf16), torch.randn(7 * dim, 2 * dim, **bf16)
    of_weight = torch.arange(1, experts + 1, dtype=torch.int32, device=device()) * 2 * hidden
    multiplier = torch.ones(experts, dim, device=device())
    line("copy of x", x.clone, 0, 4.0 * x.numel())
    line("group_quantize_rows x", partial(ops.group_quantize_rows, x, offsets, row, column), 0, 3.0 * x.numel())
    line(
        "group_quantize_rows gate_up",
        partial(ops.group_quantize_rows, weight, of_weight, row, column),
        0,
        3.0 * weight.numel(),
    )
    line("group_cast x", partial(ops.group_cast, x, offsets, multiplier, column), 0, 3.0 * x.numel())
    line("group_cast_transpose x", partial(ops.group_cast_transpose, x, offsets, strip, pillar), 0, 4.0 * x.numel())
    line("cast_transpose x", partial(ops.cast_transpose, x, strip, pillar), 0, 4.0 * x.numel())
    line("quantize_weight, tiles, gate_up", partial(ops.quantize_weight, weight, tile, tile), 0, 3.0 * weight.numel())
    line(
        f"quantize_weight, rows, {tuple(wide.shape)}",
        partial(ops.quantize_weight, wide, row, column),
        0,
        3.0 * wide.numel(),
    )


def experts(*sizes: int) -> None:
    """The experts' step with each recipe."""
    from benchmarks.gpu_step import experts_steps

    rows, dim, hidden, number = sizes
    flops = 18.0 * rows * dim * hidden
    for name, step in experts_steps(sizes).items():
        line(f"experts {number} x {rows // number}, {name}", step, flops)


def _run(part: str, spikes: str, is_dry: bool) -> None:
    """Run a part in this process."""
    shapes = (TINY,) if is_dry else EXPERTS
    with ExitStack() as stack:
        if is_dry and part in ("gemm", "copies", "casts"):
            from benchmarks.machine import Rehearsal
            from fp8compile.testing.gpu.program.arithmetic import Arithmetic
            from fp8compile.testing.gpu.program.interpreter import Interpreter

            stack.enter_context(Rehearsal("eager").target())
            stack.enter_context(Interpreter(Arithmetic(capability=(9, 0))).active())
        if part == "spike":
            sys.path.insert(0, spikes)
            import gpu_micro  # type: ignore[import-not-found]

            gpu_micro.line = line
            gpu_micro.spike()
        elif part == "autotuned":
            with torch._inductor.config.patch(max_autotune_gemm=True):
                experts(*shapes[0])
        elif part == "experts":
            for sizes in shapes:
                experts(*sizes)
        else:
            globals()[part](*shapes[0])


def _versions() -> Iterator[str]:
    yield f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}"
    if not find_spec("triton"):
        yield "Triton is not installed: no kernel of ours can run"
        return
    import triton

    has_descriptors = find_spec("triton.tools.tensor_descriptor") is not None
    yield f"Triton {triton.__version__}, TMA descriptors of the host (3.4 or later): {has_descriptors}"
    yield f"GPU {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'}"


def _commands(parts: list[str], spikes: str, is_dry: bool) -> Iterator[tuple[str, list[str]]]:
    own = ["benchmarks.gpu_decide", "--spikes", spikes, *(["--dry-run"] if is_dry else []), "--here"]
    for part in parts:
        module = COMMANDS[part][is_dry] if part in COMMANDS else [*own, part]
        yield part, [sys.executable, "-m", *module]


def main(argv: list[str] | None = None) -> int:
    """Run the parts one after the other, and return the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs")) / "gpu_decide.txt")
    parser.add_argument("--spikes", default="shared/spikes/speed")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--here", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.here:
        _run(arguments.here, arguments.spikes, arguments.dry_run)
        return 0
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU; try --dry-run")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if arguments.dry_run:
        environment["FP8COMPILE_REHEARSAL"] = "eager"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    with arguments.out.open("w", buffering=1) as out:

        def say(text: str) -> None:
            print(text, flush=True)
            print(text, file=out)

        if arguments.dry_run:
            say("DRY RUN, its numbers mean nothing")
        for each in _versions():
            say(each)
        for part, command in _commands(arguments.parts, arguments.spikes, arguments.dry_run):
            began = time.monotonic()
            limited = ["timeout", "--kill-after=5", str(PARTS[part] * (5 if arguments.dry_run else 1)), *command]
            say(f"== {part}")
            with subprocess.Popen(
                limited, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as process:
                for each in process.stdout or ():
                    say(each.rstrip())
            failed += process.returncode != 0
            say(f"== {part}: exit status {process.returncode} after {time.monotonic() - began:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
