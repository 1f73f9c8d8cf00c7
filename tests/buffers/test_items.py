"""Lists of items, as TorchRL's buffers take them, and transforms, which do not change the caller's data."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

import funcollect as fc
from tests.buffers.conftest import filled
from tests.support.compare import assert_same


@pytest.mark.parametrize("storage", [fc.LazyTensorStorage, fc.ListStorage])
def test_a_list_of_dicts_is_stacked(storage):
    buffer = filled([{"x": torch.full((3,), float(n)), "y": {"z": n}} for n in range(10)], storage(20))
    assert buffer[:]["x"][:, 0].tolist() == list(range(10))
    assert buffer.sample(4)["y"]["z"].shape == (4,)


def test_lists_in_items_are_trees():
    buffer = filled([{"pair": [torch.tensor(n), torch.tensor(-n)]} for n in range(4)])
    assert buffer[:]["pair"][1].tolist() == [0, -1, -2, -3]
    buffer.extend({"pair": [torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)]})
    assert len(buffer) == 6


@tensorclass
class Pair:
    x: torch.Tensor


def test_tensorclasses_are_refused_in_every_way():
    buffer, item = fc.ReplayBuffer(storage=fc.LazyTensorStorage(9)), Pair(x=torch.ones(3), batch_size=[])
    for call, fix in (
        (lambda: buffer.add(item), "give its to_tensordict"),
        (lambda: buffer.extend(item[None]), "give its to_tensordict"),
        (lambda: buffer.extend([item, item]), r"give \[item.to_tensordict\(\) for item in items\]"),
        (lambda: buffer.add({"a": item}), "a is Pair, expected a tensor"),
        (lambda: buffer.extend([{"a": item}, {"a": item}]), "a is Pair, expected a tensor"),
    ):
        with pytest.raises(TypeError, match=fix):
            call()
    assert len(buffer) == 0


def test_items_that_do_not_stack():
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(9))
    for items in (
        [torch.ones(2), torch.ones(3)],
        [{"pair": [torch.tensor(1), torch.tensor(1)]}, {"other": torch.tensor(1)}],
        [TensorDict({f"a key {n}": torch.ones(3) for n in range(9)}), {"other": torch.ones(3)}],
    ):
        with pytest.raises(ValueError, match=r"cannot be stacked .* in a buffer with collate_fn=") as raised:
            buffer.extend(items)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 300
    for items in ([torch.ones(2), torch.ones(3)], [{"a": 1}, {"b": 1}], [[1], [1, 2]], [np.ones(2), np.ones(3)],
                  [TensorDict({n: 1}) for n in "ab"]):  # fmt: skip
        with pytest.raises(ValueError, match=r"the items cannot be stacked .* build the buffer with a collate_fn="):
            filled(items, fc.ListStorage(9)).sample(40)
        assert len(filled(items, fc.ListStorage(9), collate_fn=list).sample(40)) == 40


def test_a_list_of_lanes():
    batch = TensorDict({"x": torch.arange(10).view(2, 5)}, [2, 5])
    assert_same(*(filled(data, ndim=2)[:] for data in (batch, list(batch.unbind(0)))))
    _, slots = fc.ring.extend(fc.ring.init(20), list(batch[0].unbind(0)))
    assert slots.tolist() == list(range(5))


@pytest.mark.parametrize("storage", [fc.ListStorage, fc.LazyTensorStorage])
def test_add_transforms_the_item(storage):
    shapes = []
    buffer = fc.ReplayBuffer(storage=storage(9), transform=lambda item: shapes.append(item.batch_size) or item * 2)
    buffer.add(TensorDict({"x": torch.tensor(3)}))
    assert shapes == [()]
    assert int(buffer[0]["x"]) == 6


CHANGES = {
    "set_": lambda td: td.set_("x", torch.zeros(3, 2)),
    "key": lambda td: td.set("x", torch.zeros(3, 2)),
    "new key": lambda td: td.set("more", torch.zeros(3)),
    "mul_": lambda td: td.apply_(lambda leaf: leaf.mul_(2)),
    "nested": lambda td: td.set_(("next", "x"), td["next", "x"].add_(1)),
    "removed": lambda td: td.exclude("x", inplace=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("storage", [fc.LazyTensorStorage, fc.ListStorage])
def test_a_transform_in_place_leaves_the_callers_batch(change, storage):
    batch = TensorDict({"x": torch.ones(3, 2), "next": {"x": torch.ones(3, 2)}}, [3])
    before, leaf = batch.clone(), batch["x"]
    buffer = filled(batch, storage(9), transform=CHANGES[change])
    buffer.extend(batch.lock_())
    if change not in ("key", "new key", "set_"):
        buffer.add(batch[0])
    assert_same(batch, before)
    assert batch["x"] is leaf
    assert_same(buffer[:3], CHANGES[change](before))


def test_a_transform_in_place_of_trees_and_arrays():
    def emptied(tree):
        for leaf in (tree["a"], tree["b"][0]):
            leaf[:] = 0
        return {"a": torch.as_tensor(tree["a"]), "b": tree["b"]}

    tree = {"a": np.ones(3), "b": (torch.ones(3, 2),)}
    buffer = filled(tree, transform=emptied)
    assert tree["a"].all()
    assert tree["b"][0].all()
    assert not buffer[:]["a"].any()
