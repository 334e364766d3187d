"""`examples.train --experts`: experts are in FP8 by conversion alone, are counted as they run, and resume."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from eight_bits import EIGHT_BITS
from gloo_ranks import shared_ranks
from test_train import done_row, has_cpu_kernel, one_line, words
from test_train_fsdp import TINY as SIZES_ON_RANKS
from test_train_fsdp import losses_of_ranks, trainer_of_ranks
from torch.distributed.tensor import DTensor
from train_runs import losses, rows_of, small_trainer, steps_of

import fp8compile as f8
from examples.train.__main__ import main
from examples.train.config import Arm
from examples.train.experts import MixtureOfExperts
from examples.train.gemms import GemmCount
from examples.train.table import complaints
from fp8compile._compat import TORCH_VERSION

EXPERTS = {"experts": 4, "top_k": 2}
RECIPES = [name for name in EIGHT_BITS if name != "delayed"]
NUM_FP8 = 4 + 2  # linears of attention, stacks of experts
NUM_OTHER = 2  # the router and the head


# -------------------------------------------------------------------- the layer


def drawn_mixture(*, experts=4, top_k=2):
    mixture = MixtureOfExperts(dim=16, hidden=24, experts=experts, top_k=top_k)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return mixture.bfloat16(), torch.randn(2, 5, 16, generator=generator).bfloat16()


def row_by_row(mixture, x):
    """Each row by each of its experts, one after the other."""
    rows = []
    for row in x.flatten(0, -2):
        shares, chosen = mixture.router(row).float().softmax(-1).topk(mixture.top_k)
        made = []
        for expert in chosen.tolist():
            gate, up = (mixture.experts.gate_up[expert] @ row).chunk(2)
            made.append(mixture.experts.down[expert] @ (F.silu(gate) * up))
        rows.append((torch.stack(made).float() * (shares / shares.sum())[:, None]).sum(0))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (4, 2), (4, 4), (32, 2)])
def test_a_row_is_the_sum_of_its_experts_by_their_shares(experts, top_k):
    mixture, x = drawn_mixture(experts=experts, top_k=top_k)  # of 32 experts, most have no row
    # one product of bfloat16 values rounds to bfloat16, in whatever order it adds: 2**-8 each of three times
    torch.testing.assert_close(mixture(x).float(), row_by_row(mixture, x), rtol=3 * 2**-8, atol=3 * 2**-8)


def test_only_convert_makes_experts_fp8_and_the_router_stays():
    mixture, _ = drawn_mixture()
    before = {name: value.clone() for name, value in mixture.state_dict().items()}
    rows = {row.fqn: row for row in f8.conversion_report(f8.convert(mixture, f8.recipes.rowwise())).rows}
    assert rows["experts"].converted
    assert not rows["router"].converted
    assert mixture.state_dict().keys() == before.keys()


# -------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("recipe", "quantized"),
    [
        pytest.param("bf16", False, id="bf16"),
        pytest.param("rowwise", False, id="rowwise"),
        pytest.param("blockwise", False, id="blockwise"),
        pytest.param("rowwise", True, id="rowwise codes"),
        pytest.param("mxfp8", True, id="mxfp8 codes", marks=pytest.mark.slow),
        pytest.param("tensorwise", True, id="tensorwise codes", marks=pytest.mark.slow),
    ],
)
def test_steps_are_one_graph_and_resume_to_the_bit(text_file, tmp_path, recipe, quantized):
    flags = {"recipe": recipe, "backend": "aot_eager", "quantized_parameters": quantized, **EXPERTS}
    first = small_trainer(text_file, **flags)
    whole = steps_of(first, 3)
    first.save(tmp_path)
    whole += steps_of(first, 3)
    second = small_trainer(text_file, **flags)
    second.load(tmp_path)
    assert len(set(whole)) == 6
    assert steps_of(second, 3) == whole[3:]
    assert first.graphs == second.graphs == {"train": 1}


def test_a_run_with_experts_is_kept_resumed_and_told(text_file, tmp_path, capsys):
    flags = ("--experts", "4", "--top-k", "2", "--compare", "bf16")
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    assert main(words(text_file, whole, *flags, recipe="rowwise")) == 0
    table = capsys.readouterr().out
    assert f"{3 * NUM_FP8} of {3 * (NUM_FP8 + NUM_OTHER)} (" in table
    assert main(words(text_file, cut, *flags, recipe="rowwise", steps=4)) == 0
    assert main(["--resume", str(cut), "--steps", "6"]) == 0
    kept = json.loads((cut / "config.json").read_text())["train"]
    assert (kept["experts"], kept["top_k"]) == (4, 2)
    trained = [sorted(row for row in losses(folder) if row[1] == "train") for folder in (cut, whole)]
    assert trained[0] == trained[1]
    assert rows_of(whole)[-1]["profiled_gemms"]["total"] == 3 * (NUM_FP8 + NUM_OTHER)


# -------------------------------------------------------------------- GEMMs


@pytest.mark.parametrize(("compiled", "experts"), [(False, 100), (True, 4)])  # of 100, most have no row
@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_the_profiler_sees_a_gemm_for_each_stack(text_file, recipe, compiled, experts):
    asked = {"bf16": 0, "rowwise_bf16_wgrad": 2 * NUM_FP8}.get(recipe, 3 * NUM_FP8)
    fp8, emulated = (asked, 0) if has_cpu_kernel(recipe) else (0, asked)
    # no dim of these sizes is padded, so that flops agree
    changes = {"experts": experts, "top_k": 1, "kv_heads": 2, "compile": compiled, "backend": "aot_eager"}
    done = done_row(small_trainer(text_file, recipe=recipe, **changes), recipe)
    seen = GemmCount(**done["profiled_gemms"])
    assert (seen.fp8, seen.emulated, seen.total) == (fp8, emulated, 3 * (NUM_FP8 + NUM_OTHER))
    share = (seen.fp8_flops + seen.emulated_flops) / seen.flops
    assert done["asked_gemms"] == (asked, seen.total, share)
    assert complaints([done], [Arm(name=recipe, recipe=recipe, seed=0)]) == []


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_experts_that_fall_back_to_bf16_are_not_counted_as_fp8(text_file, recipe, monkeypatch):
    trainer = small_trainer(text_file, recipe=recipe, compile=False, **EXPERTS)
    experts = trainer.model.blocks[0].feed_forward.experts
    monkeypatch.setattr(type(experts), "_grouped_mm", type(experts)._plain_class._grouped_mm)
    (complaint,) = complaints([done_row(trainer, recipe)], [Arm(name=recipe, recipe=recipe, seed=0)])
    assert f"{recipe}: the recipe asks for FP8 in {3 * NUM_FP8} of 24" in complaint
    assert f"{3 * (NUM_FP8 - 2)} " in complaint.split("what ran is")[1]


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--top-k", "2"], "--top-k 2 needs --experts"),
        (["--experts", "1", "--top-k", "1"], "--experts 1 has to be from 2 to 1024"),
        (["--experts", "-8"], "--experts -8 has to be at least 0"),
        (["--experts", "2000", "--top-k", "2"], "--experts 2000 has to be from 2 to 1024"),
        (["--experts", "8"], "--top-k 0 has to be from 1 to --experts 8"),
        (["--experts", "8", "--top-k", "9"], "--top-k 9 has to be from 1 to --experts 8"),
        (["--experts", "4", "--top-k", "1", "--hidden", "36"], "--hidden 36 has to be a multiple of 8"),
        (["--experts", "4", "--top-k", "1", "--kv-heads", "2", "--tp", "2"], "--ep 1 has to be a multiple of 2"),
    ],
)
def test_what_experts_do_not_go_with_is_one_line_and_leaves_nothing(text_file, tmp_path, capsys, flags, fragment):
    assert main([*words(text_file, tmp_path / "run"), *flags]) == 2
    assert fragment in one_line(capsys)
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------- experts on ranks


def losses_of_ways(path, ways):
    flags = {"recipe": "rowwise_bf16_wgrad", "backend": "aot_eager", "ep": 4, **EXPERTS}
    return [losses_of_ranks({**flags, **way}, path, steps=3) for way in ways]


def one_process(path):
    flags = {**SIZES_ON_RANKS, "recipe": "rowwise_bf16_wgrad", "compile": False}
    return small_trainer(path, **flags, **EXPERTS)


# ranks have the mean of their means of 32 or 64 losses, added in another order; before any update
MEAN = 128 * 2**-24
# and with the attention cut, sums of two parts of a row in bfloat16, by which the router may choose another expert
SUMS_OF_PARTS = 2**-8
# codes of weights are made of float32 values where FSDP2 has them, and of bfloat16 ones in one process: where the two
# lie on different sides of a boundary a code is the next one, an eighth away; 1 % of a loss at most, as under --fsdp
MOVED_CODES = 0.01


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")
def test_experts_spread_over_ranks_train_in_one_graph_as_on_one(text_file):
    results = shared_ranks().run(losses_of_ways, text_file, [{}, {"fsdp": True}, {"graph_fsdp": True}])
    replicated, sharded, in_the_graph = results[0]
    assert results == [[replicated, sharded, in_the_graph]] * 4
    assert replicated[:2] == sharded[:2] == in_the_graph[:2]  # where the rest lies changes no bit
    assert in_the_graph[2] == "quantized data, what each pass needs"
    assert replicated[2] == "nothing: all ranks have them"
    assert replicated[3] == {"train": 1, "eval": 1}
    assert replicated[0][0] == pytest.approx(one_process(text_file).gradients(), rel=MEAN)


def norms_of_gradients(made):
    """By name, of the whole of each parameter's gradient."""
    gradients = {name: each.grad for name, each in made.model.named_parameters()}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}
    return {name: grad.float().norm().item() for name, grad in whole.items()}


def gradients_of_cut_attention(path):
    flags = {"recipe": "rowwise_bf16_wgrad", "compile": False, "ep": 4, "tp": 2, "fsdp": True, **EXPERTS}
    made = trainer_of_ranks(flags, path, steps=1)
    return made.gradients(), norms_of_gradients(made)


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")
def test_experts_spread_over_ranks_that_share_rows_have_the_gradients_of_one(text_file):
    results = shared_ranks().run(gradients_of_cut_attention, text_file)
    assert results == [results[0]] * 4
    loss, norms = results[0]
    one = one_process(text_file)
    assert loss == pytest.approx(one.gradients(), rel=SUMS_OF_PARTS)
    # rows counted once for each rank that has them would add half to a norm; the furthest found was 0.10, of a router
    assert norms == pytest.approx(norms_of_gradients(one), rel=0.2)


@pytest.mark.slow
@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")
def test_experts_spread_beside_every_other_cut_train_as_on_one(text_file):
    uncompiled = {"tp": 2, "fsdp": True, "compile": False}
    ways = [{"tp": 2}, {"tp": 2, "fsdp": True}, {"tp": 2, "graph_fsdp": True}, {"tp": 2, "sp": True}, {"hsdp": True}]
    results = shared_ranks().run(losses_of_ways, text_file, [*ways, uncompiled], seconds=600)
    assert results == [results[0]] * 4
    replicated, sharded, in_the_graph, _, _, uncompiled = results[0]
    assert replicated[:2] == sharded[:2]  # where the rest lies changes no bit
    # nor does one graph. Graphs of blocks do: at each end of one, DTensor sums the ranks' parts of a bfloat16 gradient
    assert in_the_graph[:2] == uncompiled[:2]
    assert [each[3] for each in results[0][:-1]] == [{"train": 1, "eval": 1}] * 5
    expected = one_process(text_file).gradients()
    for each in results[0]:
        assert each[0][0] == pytest.approx(expected, rel=SUMS_OF_PARTS)


@pytest.mark.slow
@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")
def test_more_processes_than_experts_are_spread_over_have_them_again(text_file):
    ways = [{"ep": 2}, {"ep": 2, "fsdp": True}, {"ep": 2, "tp": 2, "compile": False}]
    results = shared_ranks().run(losses_of_ways, text_file, ways, seconds=600)
    assert results == [results[0]] * 4
    replicated, sharded, cut = results[0]
    assert replicated[:2] == sharded[:2]  # where the rest lies changes no bit
    expected = one_process(text_file).gradients()
    assert replicated[0][0] == pytest.approx(expected, rel=MEAN)
    assert cut[0][0] == pytest.approx(expected, rel=SUMS_OF_PARTS)


@pytest.mark.slow
@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")
def test_experts_that_are_codes_train_spread_over_ranks(text_file):
    codes = {"quantized_parameters": True}
    ways = [codes, {**codes, "fsdp": True}, {**codes, "ep": 1, "fsdp": True}, {**codes, "ep": 2, "recipe": "mxfp8"}]
    results = shared_ranks().run(losses_of_ways, text_file, ways, seconds=600)
    assert results == [results[0]] * 4
    expected = one_process(text_file).gradients()
    assert results[0][0][:2] == results[0][1][:2]  # where the rest lies changes no bit
    for found in results[0]:
        assert found[0][0] == pytest.approx(expected, rel=MOVED_CODES)
    assert results[0][2][2] == "quantized data: FP8 parameters"
    assert all(each[3] == {"train": 1, "eval": 1} for each in results[0])


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--ep", "2"], "--ep 2 needs --experts"),
        (["--ep", "3", "--experts", "4", "--top-k", "2"], "--experts 4 has to be a multiple of 3"),
        (
            ["--ep", "2", "--experts", "4", "--top-k", "2"],
            "take 2 processes or more, a multiple of 2, and there is 1",
        ),
    ],
)
def test_experts_that_can_not_be_spread_so_are_one_line_and_leave_nothing(
    text_file, tmp_path, capsys, flags, fragment
):
    assert main([*words(text_file, tmp_path / "run"), *flags]) == 2
    assert fragment in one_line(capsys)
    assert not (tmp_path / "run").exists()
