"""Datasets of whole episodes: Minari's format, LeRobot's, Hugging Face's tables, and arrays with D4RL's names."""

from funcollect.datasets.episodes import from_arrays
from funcollect.datasets.farama import read_minari, write_minari
from funcollect.datasets.hugging_face import from_hf, to_hf
from funcollect.datasets.robots import read_lerobot, write_lerobot

__all__ = ["from_arrays", "from_hf", "read_lerobot", "read_minari", "to_hf", "write_lerobot", "write_minari"]
