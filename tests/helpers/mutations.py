"""Plant faults in the sources of the layer, one at a time, and see that `make test` finds each.

    python tests/helpers/mutations.py [words of a fault's name ...]

Each is planted in a copy of the tree, where the tests that look at that part run as CI runs them: without what is left
to the full run. A fault that nothing finds is printed last, and the exit code is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYER = "fp8compile/ops/layer"


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: What is wrong then.
        file: Of the sources.
        old: What the file has once.
        new: What stands there instead.
        tests: Files of which one has to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "ranks that share blocks do not exchange amaxes",
        f"{LAYER}/quantize_over_ranks.py",
        "found = found if group is None else all_reduce_amax(found, group)",
        "found = found",
        ("tests/parallel/test_tensor_parallel.py",),
    ),
    Mutation(
        "the outer amax of two levels is each rank's own",
        f"{LAYER}/quantize_over_ranks.py",
        "outer_amax = all_reduce_amax(outer_amax, cut.group)",
        "outer_amax = outer_amax",
        ("tests/parallel/test_noise_on_ranks.py",),
    ),
    Mutation(
        "stochastic rounding on a rank takes the noise of other rows",
        f"{LAYER}/quantize_over_ranks.py",
        "return rows * sides[1].total, columns",
        "return rows * sides[1].length, columns",
        ("tests/parallel/test_noise_on_ranks.py",),
    ),
    Mutation(
        "a window's blocks begin one element late",
        "fp8compile/layout/cuts.py",
        "return window.narrow(dim, self.first % self.block, self.length)",
        "return window.narrow(dim, max(self.first % self.block - 1, 0), self.length)",
        ("tests/parallel/test_tensor_parallel.py",),
    ),
    Mutation(
        "gathered codes of the input are sent again in the backward",
        f"{LAYER}/operands.py",
        "return STEPS[Phase.FORWARD if gathers or is_forwards else Phase.BACKWARD]",
        "return STEPS[Phase.FORWARD if is_forwards else Phase.BACKWARD]",
        ("compile_tests/test_tensor_parallel_graphs.py",),
    ),
    Mutation(
        "codes that FSDP gathered are kept for the backward",
        f"{LAYER}/operands.py",
        "with inductor.recomputed(in_backward=True) if in_backward else inductor.left_in_forward():"
        "\n            codes",
        "if True:\n            codes",
        ("compile_tests/test_saved_bytes.py", "compile_tests/test_graph_fsdp_graphs.py"),
    ),
    Mutation(
        "the forward does not wait for the weight's codes that it keeps",
        f"{LAYER}/operands.py",
        "return replace(forward, scale=after(forward.scale, copy))",
        "return forward",
        ("compile_tests/test_placements.py",),
    ),
    Mutation(
        "layers that share an input each lay its codes out",
        f"{LAYER}/operands.py",
        "return replace(operand, codes=store(operand.codes))",
        "return operand",
        ("compile_tests/test_bytes.py",),
    ),
    Mutation(
        "a multiplier of delayed scaling is that of another tensor",
        f"{LAYER}/operands.py",
        "own = multipliers[ROW[role]]",
        "own = multipliers[2 - ROW[role]]",
        ("tests/ops/test_shapes.py",),
    ),
    Mutation(
        "the state of delayed scaling follows one rank's amaxes",
        f"{LAYER}/delayed_linear.py",
        "amaxes = all_reduce_amax(amaxes, ctx.amax_group)",
        "pass",
        ("tests/parallel/test_delayed_groups.py", "tests/parallel/test_delayed_ranks.py"),
    ),
    Mutation(
        "a layer without a gradient of x makes that of x alone",
        f"{LAYER}/output_and_gradients.py",
        "return _for_one_gradient(recipe, GRAD_INPUT if x else GRAD_WEIGHT)",
        "return _for_one_gradient(recipe, GRAD_WEIGHT if x else GRAD_INPUT)",
        ("tests/ops/test_both_directions.py",),
    ),
    Mutation(
        "the bias's gradient is summed over each rank's tokens alone",
        f"{LAYER}/layer_sharding.py",
        'return all_reduce(own, "sum", self.group) if has_some_tokens else own',
        "return own",
        ("tests/parallel/test_explicit_groups.py",),
    ),
    Mutation(
        "experts that ranks cut along K have scales of their own parts",
        f"{LAYER}/quantize_groups.py",
        "        amaxes = all_reduce_amax(amaxes, group)",
        "        amaxes = amaxes",
        ("tests/parallel/test_tensor_parallel_grouped.py", "tests/parallel/test_expert_parallel.py"),
    ),
    Mutation(
        "gradients of the input take the weight's codes of the output",
        f"{LAYER}/operands.py",
        "right = right if gemm.b_transposed or gemm.a_transposed else right.t()",
        "right = right if gemm.b_transposed or gemm.a_transposed else replace(right.t(), quantizer=right.quantizer)",
        ("tests/ops", "tests/nn/test_grouped_linear.py"),
    ),
    Mutation(
        "a tensorwise scale is that of all matrices of a stack",
        f"{LAYER}/quantize_over_ranks.py",
        "return stack, with_block(quantizer, (stack.shape[1], columns))",
        "return stack, quantizer",
        ("tests/nn/test_grouped_linear.py",),
    ),
    Mutation(
        "an outer scale is that of all matrices of a stack",
        f"{LAYER}/quantize_over_ranks.py",
        "return amaxes.amax((1, 2))",
        "return amaxes.amax().expand(len(amaxes))",
        ("tests/nn/test_grouped_linear.py", "tests/nn/test_quantized_experts.py"),
    ),
    Mutation(
        "gathered experts have the outer scales of this rank's",
        f"{LAYER}/gather_operands.py",
        "        outer_scale = _gather_scales(outer_scale, cut.dim, cut.sizes, cut.group)",
        "        outer_scale = outer_scale[:1].expand(sum(cut.sizes))",
        ("tests/parallel/test_fsdp_experts.py",),
    ),
    Mutation(
        "a rank's summand stands for the sum",
        f"{LAYER}/layer_sharding.py",
        '            return all_reduce(local, "sum", self.group)',
        "            return local",
        ("tests/parallel/test_explicit_groups.py", "tests/parallel/test_tensor_parallel_grouped.py"),
    ),
    Mutation(
        "both products multiply the codes for the output",
        "fp8compile/tensor/quantized_tensor.py",
        "return self.sets()[-1 if gemm is GEMMS[1] else 0]",
        "return self.sets()[0]",
        ("tests/tensor/test_pair_parameters.py",),
    ),
    Mutation(
        "a gather leaves the scales of the one before",
        "fp8compile/tensor/fsdp2_hooks.py",
        "            _write(memory, each.view(memory.shape))",
        "            _write(memory, memory)",
        ("tests/parallel/test_fsdp_passes.py", "tests/parallel/test_fsdp.py"),
    ),
    Mutation(
        "calls are shared that the partitioner treats unlike",
        "fp8compile/_compat/once_a_graph.py",
        'return asked, is_void, *(traceback.current_meta.get(key) for key in ("recompute", "ac_graph_id"))',
        "return ()",
        ("tests/ops/test_once_a_graph.py",),
    ),
)


def stale(mutation: Mutation, tree: Path) -> str | None:
    """Why a fault can't be planted in a tree any more, or None."""
    count = (tree / mutation.file).read_text().count(mutation.old)
    if count != 1:
        return f"{mutation.file} has {count} of: {mutation.old}"
    missing = [test for test in mutation.tests if not (tree / test).exists()]
    return f"no {', '.join(missing)}" if missing else None


def found(mutation: Mutation, tree: Path) -> str | None:
    """The first test that fails for a fault; None if none does."""
    source = tree / mutation.file
    text = source.read_text()
    source.write_text(text.replace(mutation.old, mutation.new))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
        env = {**os.environ, "PYTHONPATH": str(tree)}
        run = subprocess.run(
            [*command, *mutation.tests], cwd=tree, env=env, capture_output=True, text=True, check=False
        )
    finally:
        source.write_text(text)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest itself failed\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    failed = [line.split()[1] for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else None


def main(words: list[str]) -> int:
    """Run, print, and say by the exit code whether each was found."""
    chosen = [each for each in MUTATIONS if all(word in each.name for word in words)]
    if old := [why for each in chosen if (why := stale(each, ROOT)) is not None]:
        raise ValueError("\n".join(old))
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for mutation in chosen:
            test = found(mutation, tree)
            print(f"{mutation.name}\n    {test or 'NOT FOUND'}", flush=True)
            missed += [] if test else [mutation.name]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found" + "".join(f"\nnot found: {name}" for name in missed))
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
