"""Blocks that Ctrl-C does not interrupt."""

import signal
import threading

import pytest

from funcollect.files import Uninterrupted


def press_ctrl_c_inside(reached):
    with Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        reached.append("the end of the block")
    reached.append("what follows")


def press_ctrl_c_inside_two(reached):
    with Uninterrupted():
        press_ctrl_c_inside(reached)
        reached.append("the end of the outer block")


def test_the_interrupt_follows_at_the_end_of_the_outermost_block():
    one, two = [], []
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c_inside(one)
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c_inside_two(two)
    assert one == ["the end of the block"]
    assert two == ["the end of the block", "what follows", "the end of the outer block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_users_own_handler_is_called_an_ignored_signal_stays_ignored_and_other_threads_run_the_block():
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        reached = []
        press_ctrl_c_inside(reached)
        assert (len(reached), calls) == (2, [signal.SIGINT])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        press_ctrl_c_inside(reached)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        thread = threading.Thread(target=press_ctrl_c_inside, args=(reached,))
        thread.start()
        thread.join()
        assert len(reached) == 6
    finally:
        signal.signal(signal.SIGINT, before)
