"""Ranks stop in the same turn: a signal that comes while they tell each other waits for the next one."""

from __future__ import annotations

import os
import signal

import pytest

from fp8compile.cli.errors import Stopped
from fp8compile.cli.train.interrupts import Interrupts


class Ranks:
    """Two, of which this one gets a signal when it has said already that it has none."""

    size = 2
    signals = 1

    def largest(self, number):
        if self.signals:
            self.signals -= 1
            os.kill(os.getpid(), signal.SIGTERM)
        return number


def test_a_signal_that_comes_while_ranks_agree_is_neither_lost_nor_acted_on_alone():
    with Interrupts(Ranks()) as interrupts:
        interrupts.turn()  # raising here would leave the other rank alone
        with pytest.raises(Stopped, match="stopped by SIGTERM"):
            interrupts.turn()


def test_a_signal_to_another_rank_stops_this_one():
    class Told(Ranks):
        def largest(self, number):
            return signal.SIGINT

    with Interrupts(Told()) as interrupts, pytest.raises(Stopped, match="stopped by SIGINT"):
        interrupts.turn()
