"""Arrays between JAX and Torch: the same memory where that is safe, the same values always.

And numbers that decide whether to raise: read at once, or together and in order.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

import funcollect as fc
from funcollect.errors import BridgeError
from funcollect.interop import to_jax, to_torch, words
from funcollect.interop.bridge import argument
from funcollect.interop.memory import aligned, complain_if, reads_together
from tests.support.devices import NoReads

DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32", "complex64")


def torch_aligned(shape, dtype=torch.float32):
    """Zeros in aligned memory, which JAX reads without a copy."""
    size = torch.empty(0, dtype=dtype).element_size()
    memory = torch.from_numpy(aligned((int(np.prod(shape)) * size,), np.dtype(np.uint8)))
    return memory.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_share_memory(dtype):
    array = jnp.arange(6).reshape(2, 3).astype(dtype)
    tensor = to_torch(array)
    assert str(tensor.dtype).removeprefix("torch.") == dtype
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    back = to_jax(tensor)
    assert back.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
    assert back.dtype == array.dtype
    assert bool((back == array).all())


def test_int64_shares_memory_as_words():
    numbers = torch_aligned((3,), torch.int64)
    numbers.copy_(torch.tensor([2**40 + 7, -1, -(2**63)]))
    array = to_jax(words.as_words(numbers))
    assert array.unsafe_buffer_pointer() == numbers.data_ptr()
    again = words.as_int64(to_torch(array))
    assert again.data_ptr() == numbers.data_ptr()
    assert again.tolist() == [2**40 + 7, -1, -(2**63)]


def test_trees_share_memory():
    tree = {"a": jnp.ones((2, 3)), "b": {"c": jnp.zeros(2, jnp.int32)}}
    batch = to_torch(tree, batch_size=(2,))
    assert (type(batch), batch.batch_size) == (TensorDict, (2,))
    assert batch["b", "c"].data_ptr() == tree["b"]["c"].unsafe_buffer_pointer()
    back = to_jax(batch)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert back["a"].unsafe_buffer_pointer() == tree["a"].unsafe_buffer_pointer()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_arrays(shape):
    tensor = to_torch(jnp.full(shape, 7.0))
    assert tensor.shape == shape
    assert bool((tensor == 7).all())
    assert to_jax(torch.full(shape, 7.0)).shape == shape


def test_the_memory_outlives_its_first_owner():
    tensor = to_torch(jnp.arange(1000.0) * 2)
    array = to_jax(torch_aligned((1000,)).add_(3))
    for _ in range(10):
        jnp.zeros(1000).block_until_ready()
        torch.full((1000,), 9.0)
    assert tensor.sum() == 999_000
    assert array.sum() == 3000


def test_a_copy_is_its_own_as_a_narrowed_one_is_and_a_view_is_live():
    source, wide = torch_aligned((16,)), torch.zeros(16, dtype=torch.int64)
    shared, own, narrow = to_jax(source), to_jax(source, copy=True), to_jax(wide)
    source.fill_(5)
    wide.fill_(5)
    assert (shared[0], own[0], narrow[0], narrow.dtype) == (5, 0, 0, jnp.int32)
    array = jnp.zeros(16)
    to_torch(array, copy=True).fill_(5)
    assert array[0] == 0


def test_exported_memory_survives_a_donation_and_donated_arrays_are_refused():
    """JAX does not write into memory that Torch still reads."""
    array, donated = jnp.zeros(8), jnp.zeros(8)
    tensor, donating = to_torch(array), jax.jit(lambda x: x + 1, donate_argnums=0)
    assert donating(array)[0] == 1
    assert tensor.tolist() == [0.0] * 8
    donating(donated)
    with pytest.raises(BridgeError, match="donated or deleted"):
        to_torch(donated)


def test_unaligned_strided_expanded_and_permuted_tensors_keep_their_values():
    base = torch_aligned((12,)).copy_(torch.arange(12.0))
    for tensor in (base[1:], base[::2], base[0].expand(4), base.view(3, 4).T, base.view(3, 4)[:, 1]):
        array = to_jax(tensor)
        np.testing.assert_array_equal(array, tensor.numpy())
    assert to_jax(torch.tensor([1 + 2j]).conj())[0] == 1 - 2j
    weight = torch.ones(4, requires_grad=True)  # whose gradient does not cross
    assert to_jax(weight).tolist() == [1.0] * 4
    assert weight.requires_grad


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40 + 7])
def test_integers_that_32_bits_hold_and_others(value):
    numbers = torch.tensor([2**31 - 1, -(2**31)])
    assert to_jax(numbers).tolist() == numbers.tolist()
    assert to_jax(torch.tensor([2**32 - 1], dtype=torch.uint64)).tolist() == [2**32 - 1]
    with pytest.raises(BridgeError, match=rf"leaf 'a.b' holds {value}, expected numbers in .*as_words"):
        to_jax({"a": {"b": torch.tensor([1, value])}})
    with pytest.raises(BridgeError, match=rf"holds {2**64 - 1}"):
        to_jax(torch.tensor([2**64 - 1], dtype=torch.uint64))


def test_with_64_bits_everything_shares_memory():
    with jax.enable_x64(True):
        for dtype in (torch.int64, torch.uint64, torch.float64, torch.complex128):
            tensor = torch_aligned((4,), dtype)
            array = to_jax(tensor)
            assert array.unsafe_buffer_pointer() == tensor.data_ptr()
            assert to_torch(array).dtype == dtype


WRAPPED = "leaf 'b' is NonTensorData that holds "  # a TensorDict silently wraps what is no tensor


@pytest.mark.parametrize(("cross", "given", "error", "words"), [
    (to_torch, lambda: jax.random.key(0), TypeError, r"typed PRNG key.*key_data"),
    (to_torch, lambda: {"a": np.zeros(2)}, TypeError, r"leaf 'a' is ndarray, expected a jax\.Array"),
    (jax.jit(to_torch), lambda: jnp.zeros(2), TypeError, "traced"),
    (to_torch, lambda: jnp.zeros(4, jnp.int4), BridgeError, "the array is int4, which did not cross to Torch"),
    (to_jax, lambda: {"a": 1.0}, TypeError, r"leaf 'a' is float, expected a torch\.Tensor"),
    (to_jax, lambda: (torch.ones(2),), TypeError, r"the tensor is tuple, .* make a dict of a tuple or list"),
    (to_jax, lambda: torch.eye(2).to_sparse(), TypeError, "no dense tensor"),
    (to_jax, lambda: torch.zeros(2, device="meta"), TypeError, "no dense tensor"),
    (to_jax, lambda: TensorDict({"b": jnp.zeros(2)}, []), TypeError, f"{WRAPPED}.*ArrayImpl, expected a torch.Ten"),
    (to_jax, lambda: TensorDict({"b": NonTensorData("x")}, []), TypeError, f"{WRAPPED}str"),
    (to_jax, lambda: torch.zeros(2, dtype=torch.float64), BridgeError, "would round it: cast it"),
    (to_jax, lambda: torch.zeros(2, dtype=torch.complex128), BridgeError, "would round it: cast it"),
])  # fmt: skip
def test_what_cannot_cross_is_refused(cross, given, error, words):
    with pytest.raises(error, match=words):
        cross(given())


def test_committed_arrays_without_weak_types_compile_once():
    """Arrays from Torch are committed: with the other arguments on the device, too, there is one program."""
    device = jax.devices()[0]
    counted = jax.jit(lambda x, y: x + y)
    other = jax.device_put(jnp.zeros(4), device)
    for _ in range(3):
        other = counted(to_jax(torch_aligned((4,))), other)
    assert counted._cache_size() == 1
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    assert not to_jax(to_torch(weak)).weak_type


@pytest.mark.gpu
def test_memory_that_torch_still_has_to_read_is_not_used_again():
    env = fc.make_env("gymnax/CartPole-v1", num_envs=1024)
    policy = fc.random_policy(env)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 256)
    wanted = batch["observation"].cpu()
    for _ in range(4):  # the later rollouts have other data, in the memory that this batch had
        _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 256)
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        kept = batch["observation"].clone()
        del batch
        state, _ = fc.rollout(env, policy, state, 256)
        assert torch.equal(kept.cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_an_argument_from_the_cpu_is_not_committed_to_it(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    given = argument(tensor.T)
    assert isinstance(given, np.ndarray)
    assert not jnp.asarray(given).committed
    assert torch.equal(to_torch(jnp.asarray(given)).to(dtype), tensor.T)
    with pytest.raises(BridgeError, match="holds 1099511627776"):
        argument(torch.tensor(2**40))


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
