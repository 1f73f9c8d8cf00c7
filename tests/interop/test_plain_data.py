"""Values turned into JSON and arrays, and rebuilt without executing code."""

import io
import json
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from funcollect.files import from_data, replacing, to_data


class Pair(NamedTuple):
    one: int
    two: str


def through(value, known=(), others=()):
    data, arrays = to_data(value, known)
    np.savez(file := io.BytesIO(), allow_pickle=False, **arrays)
    file.seek(0)
    return from_data(json.loads(json.dumps(data)), np.load(file), others)


def check_back(value):
    again = through(value)
    assert type(again) is type(value)
    for name in ("maxlen", "dtype", "shape"):
        assert getattr(again, name, None) == getattr(value, name, None)
    assert all(np.ravel(again == value))


@pytest.mark.parametrize(
    "value",
    [
        None, True, -(2**70), 1.5, float("inf"), "a\nb", b"\0bytes", [], (), {}, [1, [2, (3, {"x": None})]],
        {("a", 1): 2, 3: "b", None: 4}, {1, 2}, frozenset({"a"}), deque([1, 2], maxlen=4), np.float32(0.1),
        np.int8(-3), np.bool_(True), np.float32(0.1).astype(jnp.bfloat16),
        np.arange(6.0).reshape(2, 3)[:, ::2], np.zeros((0, 3), np.uint8), np.array(3), np.array(["ab", "c"]),
        np.arange(6).reshape(2, 3).T.astype(jnp.bfloat16), np.array(3, jnp.float8_e4m3fn), np.zeros((0, 2), jnp.int4),
        np.zeros(2, [("x", ">f4"), ("y", "i8", 2)]), np.array(["2000-01-01"], "M8[D]"),
        torch.rand(3, 2).T, torch.tensor(0.5).double(), torch.rand(3, 2).bfloat16().T, torch.zeros(0, 2).long(),
        torch.tensor(True), torch.arange(6, dtype=torch.uint8).view(3, 2).T,
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value):
    check_back(value)


def test_the_values_of_a_lazy_view_come_back():
    conjugate = torch.tensor([1 + 2j]).conj()
    for tensor in (conjugate, conjugate.imag):
        assert tensor.is_contiguous()  # so that nothing else resolves it
        assert tensor.is_conj() or tensor.is_neg()
        assert torch.equal(through(tensor), tensor)


def test_arrays_and_keys_of_jax_come_back_and_named_tuples_become_plain_ones():
    for array in (jnp.arange(3), jnp.ones((2, 2), jnp.bfloat16), jnp.zeros((0,)), jnp.float32(2)):
        check_back(array)
    key = jax.random.key(7)
    assert jax.random.uniform(through(key)) == jax.random.uniform(key)
    assert through(Pair(1, "b")) == (1, "b")
    assert type(through(Pair(1, "b"))) is tuple


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64, None])
def test_generators_go_on_where_they_were(bits):
    generator = torch.Generator().manual_seed(3) if bits is None else np.random.Generator(bits(3))

    def drawn(generator):
        return torch.rand(5, generator=generator) if bits is None else generator.random(5)

    drawn(generator)
    assert (drawn(through([generator])[0]) == drawn(generator)).all()


def test_objects_that_are_held_twice_stay_one_object_and_known_ones_are_replaced():
    shared, array = [1], np.zeros(2)
    value = {"a": shared, "b": (shared, array), "c": array}
    value["self"] = value["a"]
    again = through(value)
    assert again["a"] is again["b"][0] is again["self"]
    assert again["c"] is again["b"][1]
    loop = [1]
    loop.append(loop)
    again = through(loop)
    assert again[1] is again
    one, other = object(), object()
    assert through({"x": [one, 2]}, [one], [other])["x"][0] is other


@pytest.mark.parametrize(
    "value",
    [
        object(), lambda: 0, np.array([object()]), 1j, torch.nn.Linear(1, 1), np.zeros(1, [("x", object)]),
        np.zeros(1, [("x", jnp.bfloat16)]), torch.eye(2).to_sparse(), torch.zeros(2, device="meta"),
        torch.nested.as_nested_tensor([torch.zeros(2)], layout=torch.jagged),
    ],
    ids=repr,
)  # fmt: skip
def test_anything_else_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match=r"the value\['deep'\]\[1\] is .*, which cannot be saved as data"):
        to_data({"deep": [0, value]})


def test_data_of_unknown_kinds_are_refused():
    for data in (["exec", "code"], ["tensor", "a0", "load", []], ["generator", ["dict", [["bit_generator", "x"]]]]):
        with pytest.raises((ValueError, KeyError)):
            from_data(data, {"a0": np.zeros(4, np.uint8)})


def test_threads_that_write_one_path_do_not_share_a_file(tmp_path):
    def write():
        with replacing(tmp_path / "file") as fresh:
            fresh.write_text("theirs")

    with replacing(tmp_path / "file") as fresh:
        fresh.write_text("mine")
        with ThreadPoolExecutor(1) as thread:
            thread.submit(write).result()
        assert (tmp_path / "file").read_text() == "theirs"
    assert (tmp_path / "file").read_text() == "mine"
