"""The ring in JAX against a list of frames; under jit and scan, and in place where it is donated."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import funcollect as fc
from tests.support.compare import implausible
from tests.support.envs.jax_counting import counting
from tests.support.frames import Oracle, batch_of, frames_of
from tests.support.running import scaled

LANES = 3
EXTEND = jax.jit(fc.jax_ring.extend, donate_argnums=0)
SLICES = jax.jit(fc.jax_ring.sample_slices, static_argnames=("num_slices", "slice_len"))


def arrays_of(lanes):
    """A batch of frames as `traced.rollout` lays it out."""
    batch = batch_of(lanes)
    after = {name: batch["next", name][..., 0] for name in ("done", "truncated")}
    after["observation"] = batch["next", "observation"]
    counted = {"step": batch["collector", "step"].int()}
    leaves = {"observation": batch["observation"], "next": after, "collector": counted}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf.movedim(1, 0).contiguous().numpy()), leaves)


def ring_of(lanes, steps, sizes):
    """The ring and the oracle after the lanes' frames in batches of these sizes, again and again."""
    ring = fc.jax_ring.init(arrays_of([lane[:1] for lane in lanes]), steps=steps)
    oracle, position = Oracle(steps * len(lanes)), 0
    while any(len(lane) > position for lane in lanes):
        size = sizes[position % len(sizes)]
        cut = [lane[position : position + size] for lane in lanes]
        if min(map(len, cut)) < size:
            break
        oracle.extend(cut)
        ring = EXTEND(ring, arrays_of(cut))
        position += size
    return ring, oracle


LENGTHS = st.lists(st.integers(1, 6), min_size=6, max_size=10)


@settings(max_examples=scaled(12), deadline=None)
@given(
    st.lists(LENGTHS, min_size=LANES, max_size=LANES), st.sets(st.integers(0, 9), max_size=2),
    st.just(4), st.lists(st.sampled_from([1, 5]), min_size=1, max_size=3), st.sampled_from([1, 3]),
    st.integers(0, 99),
)  # fmt: skip
def test_against_a_list(lengths, cut, steps, sizes, slice_len, seed):
    lanes = [frames_of(lane, each, cut=cut) for lane, each in enumerate(lengths)]
    ring, oracle = ring_of(lanes, steps, sizes)
    if not oracle.frames:
        return
    held = int(fc.jax_ring.held(ring))
    rows = np.arange(int(ring.written) - held, int(ring.written)) % steps
    frames = np.asarray(ring.data["observation"])[rows].reshape(-1, 3).astype(int).tolist()
    assert frames == [list(frame[:3]) for frame in oracle.frames]
    slices, found = SLICES(ring, jax.random.PRNGKey(seed), num_slices=4, slice_len=slice_len)
    trajectories = oracle.trajectories()
    assert bool(found) == any(len(steps) >= slice_len for steps in trajectories.values())
    if not found:
        return
    observation, following = np.asarray(slices["observation"]), np.asarray(slices["next"]["observation"])
    assert (observation[1:] == following[:-1]).all()
    assert (observation[..., :2] == observation[:1, :, :2]).all()
    for (lane, trajectory), column in zip(observation[0, :, :2].astype(int), observation[..., 2].T, strict=True):
        assert set(column.astype(int).tolist()) <= set(trajectories[lane, trajectory])
    assert np.asarray(slices["next"]["done"])[-1].all()
    assert np.asarray(slices["next"]["truncated"]).tolist() == [[False] * 4] * (slice_len - 1) + [[True] * 4]


@pytest.mark.parametrize("length", [4, 30], ids=["tried", "looked through"])
def test_slices_and_frames_are_uniform(length):
    short = [1] * 40 if length == 4 else [1] * 200
    lanes = [frames_of(lane, [*short, 5, length]) for lane in range(LANES)]
    ring, oracle = ring_of(lanes, len(lanes[0]), [len(lanes[0])])
    starts = {(*key, start) for key, steps in oracle.trajectories().items() for start in range(len(steps) - 3)}
    count = scaled(100) * len(starts)
    slices, found = SLICES(ring, jax.random.PRNGKey(0), num_slices=count, slice_len=4)
    assert found
    drawn = Counter(map(tuple, np.asarray(slices["observation"])[0].astype(int).tolist()))
    assert drawn.keys() == starts
    assert not implausible([*drawn.values()], np.full(len(starts), count / len(starts)))
    frames = jax.jit(fc.jax_ring.sample, static_argnums=2)(ring, jax.random.PRNGKey(1), 50 * len(oracle.frames))
    rows = Counter(map(tuple, np.asarray(frames["observation"]).astype(int).tolist()))
    counts = [rows[frame[:3]] for frame in oracle.frames]
    assert not implausible(counts, np.full(len(counts), 50.0))


def test_extend_writes_in_place_and_runs_in_a_scan():
    env = counting(4)
    policy = fc.random_policy(env)
    state = jax.jit(lambda key: fc.traced.init(env, policy, None, key=key))(jax.random.PRNGKey(0))
    shapes = jax.eval_shape(lambda state: fc.traced.rollout(env, policy, None, state, 5)[1], state)
    ring = fc.jax_ring.init(shapes, steps=12, lanes=4)

    def turn(carry, key):
        state, ring = carry
        state, batch = fc.traced.rollout(env, policy, None, state, 5)
        ring = fc.jax_ring.extend(ring, batch)
        slices, found = fc.jax_ring.sample_slices(ring, key, num_slices=2, slice_len=3)
        return (state, ring), (slices["collector"], found)

    nothing = jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape[1:]), leaf.dtype), shapes)
    assert fc.jax_ring.extend(ring, nothing) is ring

    run = jax.jit(lambda ring, state, keys: jax.lax.scan(turn, (state, ring), keys), donate_argnums=0)
    before = ring.data["count"].unsafe_buffer_pointer()
    (state, ring), (collector, found) = run(ring, state, jax.random.split(jax.random.PRNGKey(1), 7))
    assert ring.data["count"].unsafe_buffer_pointer() == before
    assert int(ring.written) == 35
    assert found.all()
    assert (np.diff(np.asarray(collector["step"]), axis=1) == 1).all()
    assert (np.diff(np.asarray(collector["episode"]), axis=1) == 0).all()


ONE = {"x": jnp.zeros((1, 2)), "next": {"done": jnp.zeros((1, 2), bool)}}
RING = fc.jax_ring.init(ONE, steps=4)


def sliced(ring, length):
    fc.jax_ring.sample_slices(ring, jax.random.PRNGKey(0), num_slices=1, slice_len=length)


BAD = {  # by the messages
    r"2\*\*31 frames or more": lambda: fc.jax_ring.init(ONE, steps=2**30),
    "the example has no leaves": lambda: fc.jax_ring.init({}, steps=3),
    r"shapes \[\(1, 2\), \(1, 2\)\], .*L = 4": lambda: fc.jax_ring.init(ONE, steps=3, lanes=4),
    "L = the same for all": lambda: fc.jax_ring.init(jnp.zeros(3), steps=3),
    "the batch has the structure": lambda: fc.jax_ring.extend(RING, {"x": ONE["x"]}),
    r"\['x'\] .* \[1, 3\] .*\[1, 2\]": lambda: fc.jax_ring.extend(RING, {**ONE, "x": jnp.zeros((1, 3))}),
    "slice_len is 5, the ring holds 4": lambda: sliced(RING, 5),
    r"lack \[.next.\]\[.done.\]": lambda: sliced(fc.jax_ring.init(ONE["x"], steps=4), 2),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()
