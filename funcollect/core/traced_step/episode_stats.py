"""Returns and lengths of episodes in traced code: in the batches of a rollout, and in an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from funcollect.arguments import check_kind, check_positive
from funcollect.core.state import CollectorState
from funcollect.interop.jax_setup import import_jax
from funcollect.policies.numerics import jax_numerics
from funcollect.trajectories.split import check_time_first

Batch = Mapping[str, Any]  # nested, of JAX arrays

_MOST = 2**31 - 1  # steps of one trajectory: step counters saturate here


class OpenEpisodes(NamedTuple):
    """The episodes that P lanes are in at the end of a batch."""

    episode: Any  # [P] int32: the number of the lane's latest episode
    length: Any  # [P] int32: its frames so far; -1 if some are missing
    returns: Any  # [P] float32 ([P, players] for several): the sum of its rewards so far


class TracedEpisodeStats(NamedTuple):
    """Statistics of episodes that ended: a pytree of JAX arrays, which are 0 where `ended` is False.

    Attributes:
        returns: undiscounted returns, in the dtype of rewards; a further dimension for several players.
        lengths: frames, int32.
        ended: whether an episode ends here.
        open: the episodes that the next batch continues, an argument of `episode_stats`; None after `evaluate`.

    >>> import jax, funcollect as fc
    >>> env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> stats = fc.traced.evaluate(env, policy, None, jax.random.PRNGKey(0), 4)
    >>> stats.returns.shape, int(stats.count), float(stats.mean_return) == float(stats.mean_length)
    ((4,), 4, True)
    """

    returns: Any
    lengths: Any
    ended: Any
    open: OpenEpisodes | None = None

    @property
    def count(self) -> Any:
        """The number of episodes that ended, [] int32."""
        return self.ended.sum()

    @property
    def mean_return(self) -> Any:
        """Their mean return, [] or [players]; nan if none ended."""
        return self.returns.sum(tuple(range(self.ended.ndim))) / self.count

    @property
    def mean_length(self) -> Any:
        """Their mean length in frames, []; nan if none ended."""
        return self.lengths.sum() / self.count


def episode_stats(batch: Batch, previous: TracedEpisodeStats | None = None) -> TracedEpisodeStats:
    """Return the returns and lengths of the episodes that end in a batch, including their frames in earlier batches.

    They are arrays ``[T, P]``, with `ended` True in the last frame of each episode. Results do not depend on how a run
    is cut into batches. Episodes with missing frames are omitted, and so are frames that repeat a finished lane.

    Raises:
        TypeError: if `batch` is no result of `rollout`, or `previous` not that of this function for the batch before.
        ValueError: if the batch lacks keys or the time dimension, or has other lanes than the batch before.

    >>> import jax, funcollect as fc
    >>> env = fc.envs.from_gymnax("CartPole-v1", num_envs=4)
    >>> policy = fc.random_policy(env)
    >>> @jax.jit
    ... def run(key):
    ...     state, stats = fc.traced.init(env, policy, None, key=key), None
    ...     for _ in range(2):
    ...         state, batch = fc.traced.rollout(env, policy, None, state, 50)
    ...         stats = episode_stats(batch, stats)
    ...     return stats
    >>> stats = run(jax.random.PRNGKey(0))
    >>> stats.returns.shape, bool(stats.count > 4)
    ((50, 4), True)
    """
    if isinstance(batch, TensorDictBase):
        raise TypeError("batch is a TensorDict, expected the dict that traced.rollout returned: call fc.episode_stats")
    check_kind("batch", batch, Mapping, "pass the dict that traced.rollout returned")
    try:
        rows = frame_of(batch)
    except KeyError as error:
        raise ValueError(f"the batch lacks {error}, expected all that traced.rollout returned: pass it all") from None
    if rows.done.ndim != 2:
        mend = "call this inside vmap for batches of several runs, give the result of traced.step a time dimension"
        raise ValueError(f"next.done has shape {list(rows.done.shape)}, expected [T, P]: {mend}")
    check_time_first(batch["collector"].get("lane"))
    start: Any = nothing_open(rows.episode[0], rows.reward[0])
    if previous is not None:
        check_kind("previous", previous, TracedEpisodeStats, "pass the result of the last call")
        check_kind("previous.open", previous.open, OpenEpisodes, "pass the result of traced.episode_stats")
        start = previous.open
        if (before := start.returns.shape) != (now := rows.reward.shape[1:]):
            raise ValueError(f"the batch before had rewards {list(before)}, this one has {list(now)}: give one run's")
    open_, (returns, lengths, ended) = import_jax().lax.scan(after_frame, start, rows)
    return TracedEpisodeStats(returns, lengths, ended, open_)


def no_stats(state: CollectorState, length: int) -> TracedEpisodeStats:
    """Return the statistics of no episode, shaped like those of a rollout of `length` steps, to begin a `scan` with.

    `state` is the state of one run before the rollout, of which only shapes are read. Raises ValueError for a length
    below 1.

    >>> import jax, funcollect as fc
    >>> env = fc.make_env("gymnax/CartPole-v1", num_envs=4)
    >>> state = fc.traced.init(env, fc.random_policy(env), None, key=jax.random.PRNGKey(0))
    >>> stats = fc.traced.no_stats(state, 50)
    >>> stats.returns.shape, int(stats.count)
    ((50, 4), 0)
    """
    check_kind("state", state, CollectorState, "pass the state that init returned")
    check_positive("length", length)
    repeat, rows = import_jax().numpy.broadcast_to, import_jax().numpy.zeros_like(state.returns)
    empty = (repeat(row, (length, *row.shape)) for row in (rows, state.lane * 0, state.lane != state.lane))
    returns, lengths, ended = empty  # which vary over a mesh, like the statistics of rollouts
    return TracedEpisodeStats(returns, lengths, ended, nothing_open(state.episode, rows))


class Frame(NamedTuple):
    """The columns of a batch [T, P], or of one step [P], that statistics are computed from."""

    episode: Any
    step: Any
    reward: Any
    done: Any
    counted: Any  # False for a frame that repeats a finished lane


def frame_of(batch: Batch) -> Frame:
    """Return the columns that `after_frame` reads."""
    counters, after = batch["collector"], batch["next"]
    return Frame(counters["episode"], counters["step"], after["reward"], after["done"], ~batch["done"])


def nothing_open(episode: Any, reward: Any) -> OpenEpisodes:
    """Return the open episodes [P] of lanes whose earlier frames are not known."""
    jnp = import_jax().numpy
    return OpenEpisodes(episode, jnp.full_like(episode, -1), jnp.zeros_like(reward))


def after_frame(open_: OpenEpisodes, row: Frame) -> tuple[OpenEpisodes, tuple[Any, Any, Any]]:
    """Return the open episodes after a frame, and the returns, lengths and flags [P] of the episodes that end in it."""
    jnp, select, nothing = import_jax().numpy, jax_numerics().select, import_jax().numpy.zeros_like(row.reward)
    begins = row.step == 0
    whole = begins | ((row.episode == open_.episode) & (open_.length == row.step))
    returns = select(begins, nothing, open_.returns) + row.reward
    ends = row.counted & row.done & whole
    length = jnp.minimum(row.step, _MOST - 1) + 1
    after = OpenEpisodes(row.episode, jnp.where(whole, length, -1), returns)
    return select(row.counted, after, open_), (select(ends, returns, nothing), jnp.where(ends, length, 0), ends)
