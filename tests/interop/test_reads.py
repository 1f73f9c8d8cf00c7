"""Numbers that decide whether to raise: at once, or together and in order."""

import math

import pytest
import torch

from funcollect.interop.memory import complain_if, reads_together
from tests.support.devices import NoReads

NAN, ONE = torch.tensor(math.nan), torch.tensor(1.0)


def doubt(number, test, text):
    def complain():
        raise ValueError(text)

    complain_if(number, test, complain)


def test_a_number_is_read_at_once():
    doubt(ONE, math.isnan, "one")
    with pytest.raises(ValueError, match="nan"):
        doubt(NAN, math.isnan, "nan")


def test_numbers_are_read_together_at_the_end_and_the_first_wrong_one_counts():
    with reads_together(), NoReads():
        doubt(ONE, math.isnan, "one")
        doubt(torch.tensor(False), bool, "false")
        doubt(torch.tensor(2**40), lambda number: number != 2**40, "integer")
    with pytest.raises(ValueError, match="second"):
        three_doubts()
    test_a_number_is_read_at_once()  # again
    with pytest.raises(KeyError):  # after an error nothing is read
        three_doubts(KeyError)


@reads_together()
def three_doubts(error=None):
    doubt(ONE, math.isnan, "first")
    doubt(torch.tensor(True), bool, "second")
    doubt(NAN, math.isnan, "third")
    if error:
        raise error
