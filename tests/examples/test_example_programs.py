"""Each example at a tiny size, on one process or on two; what it prints, and that its pages name its command."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import finished_on_ranks

from fp8compile._compat import TORCH_VERSION

ROOT = Path(__file__).parents[2]
SHORT = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if "\ndef main()" in path.read_text())
RANKS = ("own_loop_fsdp2", "hf_trainer_fsdp2", "accelerate_fsdp2", "lightning_fsdp2", "moe_ep_fsdp2")
ALONE = ("lora", "nvfp4_tail_finish", "hf_trainer_fsdp2", "accelerate_fsdp2", "lightning_fsdp2")
SAME = re.compile(r"^(\w+) and ([\w ]+): largest difference 0\.0$", re.MULTILINE)
MAX_LINES = 120


def main_of(arguments):
    """In a process of its own: the example's main, by its name and options."""
    import warnings

    warnings.simplefilter("ignore")
    name, *sys.argv[1:] = arguments
    importlib.import_module(f"examples.{name}").main()


def last_losses(printed):
    """Losses of the last steps by the name of the training."""
    rows = re.findall(r"^(.+?)  +(\d+\.\d{5})  +(\d+\.\d{5})$", printed, re.MULTILINE)
    return {name.strip(): (float(first), float(last)) for name, first, last in rows}


def ran(name, folder, *, size):
    found = find_spec({"lightning_fsdp2": "lightning", "hf_trainer_fsdp2": "accelerate"}.get(name, "torch"))
    if not found:
        pytest.skip("needs what the extra fp8compile[test] installs")
    printed = finished_on_ranks(main_of, [name, "--steps", "4"], folder, size=size)
    losses = last_losses(printed)
    bf16, own = losses["bf16"], next(own for training, own in losses.items() if training != "bf16")
    assert own != bf16, printed
    assert own == pytest.approx(bf16, rel=0.02), printed  # four steps of one model in FP8 and in bf16
    assert " converted" in printed
    return printed


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups in a subclass need PyTorch 2.12")
@pytest.mark.parametrize("name", RANKS)
def test_an_example_on_two_ranks_has_the_digits_of_values_on_the_wire(name, tmp_path):
    same = {other for _, other in SAME.findall(ran(name, tmp_path, size=2))}
    assert "values gathered" in same
    assert ("resumed" in same) is (name in ("hf_trainer_fsdp2", "moe_ep_fsdp2"))


@pytest.mark.parametrize("name", ALONE)
def test_an_example_in_one_process_is_near_bf16(name, tmp_path):
    ran(name, tmp_path, size=1)


def test_rollouts_of_streamed_codes_are_those_of_the_policy_that_trains(tmp_path):
    printed = finished_on_ranks(main_of, ["rl.__main__", "--steps", "2"], tmp_path, size=3)
    own, *others = re.findall(r"  (\d\.\d\de[+-]\d\d)$", printed, re.MULTILINE)
    assert float(own) == 0, printed
    assert len(others) == 2
    assert all(float(each) > 0 for each in others)


def test_all_short_examples_are_run():
    assert {*RANKS, *ALONE} == set(SHORT)


@pytest.mark.parametrize("name", SHORT)
def test_an_example_is_short_and_its_command_stands_in_it_and_in_the_table(name):
    source, table = ((ROOT / "examples" / each).read_text() for each in (f"{name}.py", "README.md"))
    assert len(source.splitlines()) <= MAX_LINES
    command = re.search(rf"\| `(\S+ .*-m examples\.{name})` \|", table).group(1)
    assert command.startswith("torchrun --nproc-per-node 2 " if name in RANKS else "python ")
    assert f"\n{command}\n" in source


def test_a_bfloat16_repository_tests_its_graphs_against_its_baseline():
    folder = ROOT / "examples" / "graph_tests"
    workflow = (folder / ".github" / "workflows" / "graphs.yml").read_text()
    command = re.search(r"run: python (-m pytest .*) --junit-xml", workflow).group(1).split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = ["-p", "pytest_fp8compile", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *command, *options], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.skipif(not find_spec("torchtitan"), reason="needs torchtitan 0.3.0 (the extra fp8compile[torchtitan])")
def test_configs_for_torchtitan_build_models_in_fp8():
    program = """
import sys, torch
sys.path.insert(0, "tests/helpers")
from torchtitan_on_cpu import import_torchtitan
import_torchtitan()
import fp8compile as f8
from examples.torchtitan import configs
for name in configs.__all__:
    config = getattr(configs, name)()
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    print(name, sum(row.converted for row in f8.conversion_report(model).rows))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"_float8 [1-9]", done.stdout)) == 3
