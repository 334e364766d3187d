"""The largest moment of a run, and of a model with more equal blocks than were run."""

from __future__ import annotations

import pytest

from fp8compile.testing.memory.timeline import Moment, Timeline, largest_of_blocks


def forward(count):
    """A forward of blocks: each keeps 10 bytes and frees 7."""
    changes = [("inputs", 3)]
    for _ in range(count):
        changes += [("kept", 10), ("temporaries", 7), ("temporaries", -7)]
    return Timeline(Moment(parameters=100 * count, inputs=5), (*changes, ("results", 2)))


def backward(count, *, kept, gradients, temporaries=40, alternating=False):
    """A backward of blocks: each frees what it kept, and makes gradients."""
    changes = [("temporaries", 1)]
    for number in range(count):
        block = [
            ("temporaries", temporaries),
            ("kept", -kept),
            ("gradients", gradients),
            ("temporaries", -temporaries),
        ]
        changes += block[::-1] if alternating and number % 2 else block
    return Timeline(Moment(kept=kept * count), (*changes, ("temporaries", -1)))


def test_a_moment_is_the_sum_of_its_owners():
    assert Moment(parameters=1, inputs=2, kept=3, results=4, gradients=5, temporaries=6).bytes == 21


def test_the_largest_moment_is_the_first_of_the_largest():
    changes = (("kept", 4), ("temporaries", 2), ("temporaries", -2), ("gradients", 2))
    assert Timeline(Moment(parameters=1), changes).largest() == Moment(parameters=1, kept=4, temporaries=2)
    assert Timeline(Moment(parameters=1), ()).largest() == Moment(parameters=1)


def of_blocks(run, count, **sizes):
    return largest_of_blocks([run(few, **sizes) for few in (2, 3, 4)], count)


@pytest.mark.parametrize("count", [2, 3, 5, 32])
def test_a_forward_of_blocks_keeps_each_and_has_temporaries_once(count):
    found = of_blocks(forward, count)
    assert found == forward(count).largest()
    assert found == Moment(parameters=100 * count, inputs=8, kept=10 * count, temporaries=7)


@pytest.mark.parametrize(("kept", "gradients"), [(10, 1), (1, 10), (5, 5), (30, 31)])
@pytest.mark.parametrize("count", [2, 7, 32])
def test_a_backward_is_largest_where_it_begins_or_where_it_ends(kept, gradients, count):
    sizes = {"kept": kept, "gradients": gradients}
    found = of_blocks(backward, count, **sizes)
    assert found is not None
    assert found.bytes == backward(count, **sizes).largest().bytes


def test_blocks_that_alternate_are_not_counted():
    assert of_blocks(backward, 32, kept=10, gradients=20, alternating=True) is None


def test_a_largest_moment_that_another_one_overtakes_is_not_counted():
    """Few blocks are largest at the begin, by its temporaries; many at the end, by their gradients."""

    def run(count):
        begin = [("temporaries", 100), ("temporaries", -100)]
        return Timeline(Moment(kept=count), (*begin, *[("gradients", 3)] * count))

    assert run(4).largest() == Moment(kept=4, temporaries=100)
    assert run(40).largest() == Moment(kept=40, gradients=120)
    assert of_blocks(run, 40) is None
