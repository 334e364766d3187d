"""Programs that run together have the bits of programs that run one after the other."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
]
ALONE, TOGETHER = 1, 1 << 17


@pytest.fixture
def launches(monkeypatch):
    """Launch a kernel of tests/helpers/interpreted_functions.py; returns the batches, by number of programs."""
    import interpreted_functions

    from fp8compile.testing.gpu.program import interpreter
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic

    sizes = []
    plain = interpreter.Batch.of
    monkeypatch.setattr(
        interpreter.Batch, "of", lambda programs, grid: sizes.append(len(programs)) or plain(programs, grid)
    )

    def launch(name, *tensors, elements, order="forwards", grid, **constants):
        sizes.clear()
        with interpreter.Interpreter(Arithmetic(), elements).active(order):
            getattr(interpreted_functions, name)[grid](*tensors, **constants)
        return list(sizes)

    return launch


@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
def test_programs_that_diverge_are_run_again_in_parts(launches, order, assert_bits_equal):
    """What was stored and added before they diverged counts once."""
    counts = torch.tensor([0, 1, 5, 1, 0, 5, 3, 1], dtype=torch.int32)
    x = torch.randn(8 * 16, generator=torch.Generator().manual_seed(0))
    changed, added = x.clone(), torch.zeros_like(x)
    batches = launches("diverging", changed, added, counts, elements=TOGETHER, order=order, grid=(8,), SIZE=16)
    assert batches[0] == 8
    assert sorted(batches[1:]) == [1, 2, 2, 3, 3, 5]  # count > 2 or not; and then one batch for each count
    each = (x + 1).view(8, 16)
    assert_bits_equal(added, each.flatten(), "added")
    for program, count in enumerate(counts.tolist()):
        own = each[program] * 3 if count > 2 else each[program]
        for more in (*range(count), program * 4, program * 4 + 2, *[-2] * count):
            own = own + more
        each[program] = own
    assert_bits_equal(changed, each.flatten(), "changed")


@pytest.mark.parametrize("size", [8, 16])
def test_what_moves_elements_stays_within_a_program(launches, size, assert_bits_equal):
    x = torch.randn(5, 8, size, generator=torch.Generator().manual_seed(1))
    alone, together = (torch.full((5, 8, 8, size), torch.nan) for _ in range(2))
    assert launches("rearranged", x, alone, elements=ALONE, grid=(5,), ROWS=8, SIZE=size) == [1] * 5
    assert launches("rearranged", x, together, elements=TOGETHER, grid=(5,), ROWS=8, SIZE=size) == [5]
    assert_bits_equal(together, alone, "together")
    x = x.double()
    positive = torch.where(x > 0, torch.arange(size), -1)
    last = positive.cummax(-1).values.clamp(min=0)
    expected = (
        x.cumsum(-1), x.flip(1).cumsum(1).flip(1), x.gather(-1, last) + last, x.mT.reshape(x.shape),
        x.view(5, 8, -1, 2).flip(-1).view(x.shape),
        x.sum((1, 2), keepdim=True) - x.amax(2, keepdim=True) + x.amin(1, keepdim=True) * torch.arange(size),
        x @ x.mT if size == 8 else x, x.roll(-1, -1),
    )  # fmt: skip
    for number, each in enumerate(expected):  # sums of 128 float32 numbers: 128 roundings at most
        torch.testing.assert_close(together[:, number].double(), each, rtol=128 * 2**-24, atol=128 * 2**-22)


def test_a_histogram_is_of_one_program(launches):
    x = torch.randint(0, 8, (6, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    y = torch.empty(6, 8, dtype=torch.int32)
    assert launches("counted", x, y, elements=TOGETHER, grid=(6,), SIZE=32, BINS=8) == [6]
    assert torch.equal(y, torch.stack([each.bincount(minlength=8).int() for each in x]))


def test_the_size_of_a_block_bounds_the_programs_that_run_together(launches):
    x, y = torch.randn(40 * 32), torch.empty(40 * 32)
    sizes = launches("copy", x, y, 40 * 32, elements=512, grid=(40,), FIRST=0, STEP=32, BLOCK=32)
    assert sizes == [8, 16, 16]
    assert torch.equal(x, y)


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated:UserWarning")
@pytest.mark.parametrize(("name", "grid"), [("tiles_by_pointers", (3,)), ("tiles_by_descriptors", (3, 2))])
def test_blocks_that_a_kernel_names_by_their_shape_end_at_the_tensors_edge(launches, name, grid):
    from triton.runtime import interpreter

    if name == "tiles_by_pointers" and not hasattr(interpreter, "BlockPointerHandle"):
        pytest.skip("Triton 3.9 has no block pointers")
    x, y = torch.randn(20, 12), torch.full((20, 12), torch.nan)
    count = math.prod(grid)
    assert launches(name, x, y, 20, 12, elements=TOGETHER, grid=grid, TILE=8) == [count]
    assert torch.equal(y, x)
    with pytest.raises(IndexError, match=f"{name}: program . would load . of .. elements outside"):
        launches(name, x[:19, :], y, 20, 12, elements=TOGETHER, grid=grid, TILE=8)
