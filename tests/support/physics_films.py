"""A program that compares pictures of physics with those that brax makes; start it with MUJOCO_GL=egl or osmesa.

It exits with 77 if there is no such OpenGL, and prints what a user is told. Arguments are ids of environments that it
also films.
"""

import sys
import tempfile
from types import SimpleNamespace

import mujoco
import numpy as np

NO_OPENGL = 77


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


def tell_why():
    import funcollect as fc

    env = fc.make_env("brax/inverted_pendulum")
    try:
        fc.record(env, fc.random_policy(env), "film.gif")
    except fc.EnvError as error:
        print(error)


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
    try:
        mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 8, 8).close()
    except Exception:
        tell_why()
        sys.exit(NO_OPENGL)
    compare_with_brax()
    for each in sys.argv[1:]:
        film(each)
