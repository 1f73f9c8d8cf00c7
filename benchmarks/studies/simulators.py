"""Which simulators go together with the library, and what each can do: the table of docs/guides/simulators.md.

``python -m benchmarks.studies.simulators [SUITE ...]`` runs the line of each suite that is installed, tries what the
columns say, and writes the rows into the page. Rows of suites that are not installed stay as they are there.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np

import funcollect as fc
from funcollect.envs.base import autoreset_mode

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "simulators.md"
COLUMNS = ("suite", "line", "resets", "seeds", "fork", "save", "film")
IMPORTS = {  # what a line that has the name imports first
    "AtariVectorEnv": "from ale_py.vector_env import AtariVectorEnv",
    "AutoresetMode": "from gymnasium.vector import AutoresetMode",
    "CartPoleFunctional": "from gymnasium.envs.phys2d.cartpole import CartPoleFunctional",
    "GymEnv": "from torchrl.envs import GymEnv",
    "supersuit": "import supersuit",
    "SyncVectorEnv": "from gymnasium.vector import SyncVectorEnv",
}


class Row(NamedTuple):
    """A suite: the line that makes an environment, and the modules that have to be installed for it."""

    suite: str
    line: str
    needs: str = ""  # modules, with spaces between them
    why_not: str = ""  # why it cannot be run on a CPU with the versions of constraints.txt
    quick: bool = False  # whether `make test` runs it


class Crafter(gymnasium.Env[Any, Any]):
    """Crafter, whose interface is that of older releases of Gym. An episode depends on its seed alone."""

    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(17)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.game = __import__("crafter").Env(seed=int(self.np_random.integers(2**31)))
        return self.game.reset(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, done, _ = self.game.step(action)
        died = self.game._player.health <= 0
        return observation, reward, died, done and not died, {}

    def render(self) -> Any:
        return self.game.render()


class NetHack(gymnasium.Wrapper[Any, Any, Any, Any]):
    """NLE, whose games take their seeds by a method of their own."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("nle:NetHackScore-v0"))

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.env.unwrapped.seed(seed, seed, False)  # type: ignore[attr-defined]
        return self.env.reset(seed=seed, options=options)


def mjlab_cartpole() -> Any:
    """Return mjlab's cart and pole in two lanes, simulated by MuJoCo Warp on the CPU."""
    config = import_module("mjlab.tasks.cartpole.cartpole_env_cfg").cartpole_balance_env_cfg()
    config.scene.num_envs, config.auto_reset = 2, False
    return import_module("mjlab.envs").ManagerBasedRlEnv(config, "cpu")


def _vector(mode: str) -> str:
    made = f'SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.{mode})'
    return f"fc.make_env(lambda: {made})"


def _atari(mode: str) -> str:
    return f'fc.make_env(lambda: AtariVectorEnv("pong", num_envs=2, autoreset_mode=AutoresetMode.{mode}))'


_GPU = "needs an NVIDIA GPU"
ROWS = (
    Row("Gymnasium, classic control", 'fc.make_env("CartPole-v1", num_envs=2)', quick=True),
    Row("Gymnasium, toy text", 'fc.make_env("FrozenLake-v1", num_envs=2)', quick=True),
    Row("Gymnasium, Box2D", 'fc.make_env("LunarLander-v3", num_envs=2)', "Box2D", quick=True),
    Row("Gymnasium, MuJoCo", 'fc.make_env("HalfCheetah-v5", num_envs=2)', "mujoco"),
    Row("Gymnasium, over processes", 'fc.make_env("CartPole-v1", num_envs=2, num_workers=2)'),
    Row("`VectorEnv`, `DISABLED`", _vector("DISABLED"), quick=True),
    Row("`VectorEnv`, `NEXT_STEP`", _vector("NEXT_STEP"), quick=True),
    Row("`VectorEnv`, `SAME_STEP`", _vector("SAME_STEP"), quick=True),
    Row(
        "`VectorEnv` without masks",
        'fc.make_env(lambda: gymnasium.make_vec("CartPole-v1", 2, "vector_entry_point"))',
        quick=True,
    ),
    Row("Gymnasium's `FuncEnv`", "fc.make_env(CartPoleFunctional(), num_envs=2, max_episode_steps=500)"),
    Row("Atari", 'fc.make_env("ale/Pong", num_envs=2)', "ale_py", quick=True),
    Row("Atari, ale-py's vector", _atari("NEXT_STEP"), "ale_py", quick=True),
    Row("the same, `SAME_STEP`", _atari("SAME_STEP"), "ale_py"),
    Row("EnvPool", 'fc.make_env("envpool/CartPole-v1", num_envs=2)', "envpool", quick=True),
    Row("EnvPool, asynchronous", 'fc.make_env("envpool/CartPole-v1", num_envs=4, batch_size=2)', "envpool", quick=True),
    Row("TorchRL", 'fc.make_env(lambda: GymEnv("CartPole-v1"), num_envs=2)', "torchrl"),
    Row("funcollect's own, in Torch", 'fc.make_env("torch/CartPole-v1", num_envs=2)', quick=True),
    Row("gymnax", 'fc.make_env("gymnax/CartPole-v1", num_envs=2)', "gymnax seaborn"),
    Row("brax", 'fc.make_env("brax/inverted_pendulum", num_envs=2)', "brax"),
    Row("jumanji", 'fc.make_env("jumanji/Snake-v1", num_envs=2)', "jumanji"),
    Row("navix", 'fc.make_env("navix/Navix-Empty-5x5-v0", num_envs=2)', "navix"),
    Row("pgx", 'fc.make_env("pgx/tic_tac_toe", num_envs=2)', "pgx"),
    Row("MuJoCo Playground", 'fc.make_env("playground/CartpoleBalance", num_envs=2)', "mujoco_playground"),
    Row(
        "the same, in MuJoCo Warp",
        'fc.make_env("playground/CartpoleBalance", config_overrides={"impl": "warp"})',
        why_not=_GPU,
    ),
    Row("XLand-MiniGrid", 'fc.make_env("xminigrid/XLand-MiniGrid-R1-9x9", num_envs=2)', "xminigrid"),
    Row(
        "Craftax",
        'fc.make_env("craftax/Craftax-Classic-Symbolic-v1", num_envs=2)',
        why_not="its program compiles for more than ten minutes",
    ),
    Row("Kinetix", "fc.make_env((kinetix_env, env_params), num_envs=2)", why_not="3.0.2 wants JAX 0.9 or older"),
    Row("MiniGrid", 'fc.make_env("minigrid:MiniGrid-DoorKey-5x5-v0", num_envs=2, drop=["mission"])', "minigrid"),
    Row("Crafter", "fc.make_env(Crafter, num_envs=2)", "crafter ruamel"),
    Row("Meta-World", 'fc.make_env("metaworld:Meta-World/MT1", env_name="reach-v3", seed=1, num_envs=2)', "metaworld"),
    Row(
        "Gymnasium-Robotics",
        'fc.make_env("gymnasium_robotics:PointMaze_UMaze-v3", num_envs=2)',
        "gymnasium_robotics",
    ),
    Row(
        "dm_control, by Shimmy", 'fc.make_env("shimmy:dm_control/cartpole-balance-v0", num_envs=2)', "dm_control shimmy"
    ),
    Row("NetHack (NLE)", "fc.make_env(NetHack, num_envs=2)", "nle"),
    Row(
        "SuperSuit's wrappers",
        'fc.make_env(lambda: supersuit.frame_stack_v1(gymnasium.make("CartPole-v1"), 4), num_envs=2)',
        "supersuit",
    ),
    Row("PufferLib", "fc.make_env(lambda: the_gymnasium_env(), num_envs=2)", why_not="no wheel for this Python"),
    Row(
        "Procgen",
        'fc.make_env("envpool/CoinrunEasy-v0", num_envs=2)',
        why_not="EnvPool's games need the system's Qt 5",
    ),
    Row(
        "ManiSkill", "fc.envs.from_torch_vector_env(lambda: ManiSkillVectorEnv(…))", why_not="needs a device for Vulkan"
    ),
    Row("Isaac Lab", "fc.envs.from_torch_vector_env(lambda: gymnasium.make(…))", why_not=_GPU),
    Row("mjlab", "fc.envs.from_torch_vector_env(mjlab_cartpole)", "mjlab"),
)
_HOW = {
    "Lanes": "lane by lane",
    "AtariLanes": "lane by lane",
    "WorkerLanes": "lane by lane",
    "SeparateLanes": "lane by lane",
    "TorchRLLanes": "by a mask",
    "EnvPoolLanes": "lanes by index",
    "AsynchronousLanes": "lanes run ahead",
    "VectorLanes": "by a mask",
    "SelfResettingLanes": "by itself",
    "LateLanes": "lanes run ahead",
}


def installed(row: Row) -> bool:
    """Whether the line can be run here."""
    return not row.why_not and all(find_spec(name) for name in row.needs.split())


def environment(line: str) -> Any:
    """What a line makes."""
    scope: dict[str, Any] = {"fc": fc, "gymnasium": gymnasium, "Crafter": Crafter, "NetHack": NetHack}
    scope["mjlab_cartpole"] = mjlab_cartpole
    for name, statement in IMPORTS.items():
        if name in line:
            exec(statement, scope)
    return eval(line, scope)


def facts(row: Row) -> dict[str, str]:
    """Run a row's line, and return its cells: everything is tried, with random actions."""
    env = environment(row.line)
    policy = fc.random_policy(env)
    state, again = (fc.init(env, policy, seed=0) for _ in range(2))
    state, batch = fc.rollout(env, policy, state, 6)
    again, other = fc.rollout(env, policy, again, 6)
    repeats = bool((batch == other).all())
    fc.close(again)
    found = {"suite": row.suite, "line": f"`{row.line}`"}
    if env.backend == "host":
        simulators = state.env_state.simulation.simulators
        mode = autoreset_mode(simulators._env) if hasattr(simulators, "_env") else None
        found["resets"] = _HOW[type(simulators).__name__] + (f" (`{mode}`)" if mode else "")
    else:
        found["resets"] = {"torch": "by a mask", "device": "lanes by index"}.get(env.backend, "in the compiled loop")
    found["seeds"] = getattr(env, "seeding", "episode") if repeats else "not by `reset(seed=…)`"
    with tempfile.TemporaryDirectory() as folder:
        found["fork"] = _tried(lambda: fc.close(fc.fork(env, state)), getattr(env, "forking", "value"))
        found["save"] = _tried(lambda: _saved(f"{folder}/state", env, policy, state), "yes")
        fc.close(state)
        found["film"] = _tried(lambda: fc.record(*_filmed(row, env), f"{folder}/film.gif", max_frames=2), "yes")
    return found


def _saved(path: str, env: Any, policy: Any, state: Any) -> None:
    fc.save(path, state)
    fc.close(fc.load(path, env, policy))


def _filmed(row: Row, env: Any) -> tuple[Any, Any]:
    """The environment of a line that renders, and a policy."""
    if env.backend == "host" and not row.line.startswith("fc.make_env(lambda") and "envpool" not in row.line:
        env = environment(row.line.removesuffix(")") + ', render_mode="rgb_array")')
    elif env.backend == "host":
        env = environment(re.sub(r'(gymnasium\.make\("[^"]*")', r'\1, render_mode="rgb_array"', row.line))
    return env, fc.random_policy(env)


def _tried(call: Any, what: str) -> str:
    """`what` if the call succeeds, otherwise what is lacking."""
    try:
        call()
    except Exception as error:
        lacks_opengl = re.search(r"OpenGL|MUJOCO_GL|EGL|GLFW", str(error))
        return "with OpenGL" if lacks_opengl else "no"
    return what


def cells() -> dict[str, dict[str, str]]:
    """The rows of the page's table, by their suites."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in rows if len(row) == len(COLUMNS)}


def table(known: Mapping[str, dict[str, str]]) -> str:
    """The table: of each suite the cells that are known for its line, or that it has not been run."""
    rows = [known.get(row.suite, {}) for row in ROWS]
    rows = [
        cells if cells.get("line") == f"`{row.line}`" else not_run(row) for cells, row in zip(rows, ROWS, strict=True)
    ]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row[name] for name in COLUMNS] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def not_run(row: Row) -> dict[str, str]:
    """The cells of a suite that has not been run."""
    why = f"not run here: {row.why_not or 'not yet'}"
    return dict.fromkeys(COLUMNS, "") | {"suite": row.suite, "line": f"`{row.line}`", "resets": why}


def main() -> None:
    """Run the suites that are named, or all that are installed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", help="suites, as the table names them")
    chosen = parser.parse_args().suites
    os.environ.setdefault("MUJOCO_GL", "egl")
    warnings.simplefilter("ignore")
    for row in ROWS:
        known = {}
        if installed(row) and (row.suite in chosen or not chosen):
            try:
                known[row.suite] = facts(row)
            except Exception as error:
                print(f"{row.suite}: {error!r}", flush=True)
                continue
            print(*known[row.suite].values(), sep=" | ", flush=True)
        before, _, after = PAGE.read_text().partition("| suite |")
        PAGE.write_text(f"{before}{table(cells() | known)}\n\n{after.partition(chr(10) * 2)[2]}")


if __name__ == "__main__":
    main()
