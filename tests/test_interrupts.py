"""Blocks that Ctrl-C does not interrupt."""

import itertools
import signal
import sys
import threading

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import funcollect as fc
from funcollect.files import Uninterrupted
from tests.support.cases import POLICIES


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


class InterruptedAt:
    """A trace that presses Ctrl-C in the line of this number, of those that enter or leave a block."""

    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, _):
        if frame.f_code.co_name not in ("__enter__", "__exit__"):
            return None
        if event == "line" and (left := self.left) is not None:
            self.left = left - 1
            if not left:
                self.left = None
                raise KeyboardInterrupt
        return self


ENVS = {
    "own pace": lambda: fc.make_env("CartPole-v1", num_envs=2, num_workers=2, wait="any"),
    "host": lambda: fc.make_env("CartPole-v1", num_envs=2),
    "torch": lambda: fc.make_env("torch/CartPole-v1", num_envs=2),
}


@pytest.mark.parametrize(("name", "kind"), [
    *itertools.product(ENVS, ["torch_mlp", "torch_recurrent"]),
    *itertools.product(["host", "torch"], ["tensordict_actor"]),  # which draws from Torch's generator
])  # fmt: skip
def test_torch_is_left_as_it_was_wherever_a_rollout_is_interrupted(name, kind):
    env = ENVS[name]()
    policy = POLICIES[kind](env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 3)  # imports are not to be interrupted
    number, finished = 0, False
    while not finished:
        state, trace, before = fc.recover(env, state), InterruptedAt(number), sys.gettrace()
        sys.settrace(trace)
        try:
            state, _ = fc.rollout(env, policy, state, 3)
        except KeyboardInterrupt:
            number += 1
        finally:
            sys.settrace(before)
        finished = trace.left is not None
        assert torch.is_grad_enabled(), number
        assert not _get_current_dispatch_mode_stack(), number
    assert number > 5
    fc.close(state)
