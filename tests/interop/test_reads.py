"""Numbers that decide whether to raise: at once, or together and in order."""

import math

import pytest
import torch

from funcollect.interop.memory import complain_if, reads_together
from tests.support.devices import NoReads

NAN, ONE = torch.tensor(math.nan), torch.tensor(1.0)


def complaint(text):
    def complain():
        raise ValueError(text)

    return complain


def test_a_number_is_read_at_once():
    complain_if(ONE, math.isnan, complaint("one"))
    with pytest.raises(ValueError, match="nan"):
        complain_if(NAN, math.isnan, complaint("nan"))


def test_numbers_are_read_together_at_the_end_and_the_first_wrong_one_counts():
    with reads_together(), NoReads():
        for number, test, text in (
            (ONE, math.isnan, "one"),
            (torch.tensor(False), bool, "false"),
            (torch.tensor(2**40), lambda number: number != 2**40, "integer"),
        ):
            complain_if(number, test, complaint(text))
    with pytest.raises(ValueError, match="second"):
        three_doubts()
    with pytest.raises(ValueError, match="nan"):
        complain_if(NAN, math.isnan, complaint("nan"))


def three_doubts():
    with reads_together():
        complain_if(ONE, math.isnan, complaint("first"))
        complain_if(torch.tensor(True), bool, complaint("second"))
        complain_if(NAN, math.isnan, complaint("third"))


def test_after_an_error_nothing_is_read():
    with pytest.raises(KeyError):
        a_doubt_before_an_error()


@reads_together()
def a_doubt_before_an_error():
    complain_if(NAN, math.isnan, complaint("nan"))
    raise KeyError
