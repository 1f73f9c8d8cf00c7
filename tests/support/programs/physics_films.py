"""A program that compares pictures of physics with those that brax makes; start it with MUJOCO_GL=egl or osmesa.

Arguments are ids of environments of which it also makes films.
"""

import sys
import tempfile
from types import SimpleNamespace

import numpy as np


def compare_with_brax():
    import brax.envs
    import brax.io.image

    import funcollect as fc

    raw = brax.envs.get_environment("inverted_pendulum", backend="spring")
    env = fc.envs.from_brax(raw)
    states = [SimpleNamespace(q=np.array(q), qd=np.zeros(2)) for q in [(0, 0), (0.1, 0.4)]]
    with env.renderer() as (fps, draw):
        pictures = [draw(SimpleNamespace(pipeline_state=state), None) for state in states]
    assert round(fps * float(raw.dt), 3) == 1
    assert (pictures[0] != pictures[1]).any()
    assert np.array_equal(pictures, brax.io.image.render_array(raw.sys, states))


def film(name):
    import imageio.v3

    import funcollect as fc

    env = fc.make_env(name)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/film.gif"
        fc.record(env, fc.random_policy(env), path, max_frames=8, exploration_type=fc.ExplorationType.RANDOM)
        pictures = imageio.v3.imread(path, index=None)
    assert pictures.shape == (9, 240, 320, 3)
    assert (pictures[0] != pictures[-1]).any()


if __name__ == "__main__":
    compare_with_brax()
    for each in sys.argv[1:]:
        film(each)
