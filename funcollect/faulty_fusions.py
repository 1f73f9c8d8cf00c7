"""Turns off the CPU fusions of XLA in versions of jaxlib where they compute wrong numbers."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from importlib import metadata

# The "YNN" fusions of these compute wrong numbers (jax#39103) or crash (jax#39257). 0.10.1, 0.11.1, 0.11.2 are correct.
_RELEASE = re.compile(r"(0\.10\.2|0\.11\.0)(?!\d)")  # pre-releases included
_FLAG = "--xla_cpu_experimental_ynn_fusion_type"


@cache
def avoid_faulty_fusions() -> str:
    """Turn the faulty fusions off before XLA reads its flags, at JAX's first client; return a note for the user, or "".

    Any other version of jaxlib is left alone, since an unknown flag could abort the process; so is a flag that is set.
    """
    version, flags = _jaxlib_version(), os.environ.get("XLA_FLAGS", "")
    if version is None or not _RELEASE.match(version) or _FLAG in flags:
        return ""
    fault = f"jaxlib {version} can crash or compute wrong numbers in its CPU fusions (jax#39103, jax#39257)"
    mend = "install jaxlib 0.10.1 (Python 3.11) or 0.11.2 and newer"
    if _has_client():
        return f"{fault}, and JAX had computed before funcollect could turn them off: {mend}, or set XLA_FLAGS={_FLAG}="
    if flags.strip() and not flags.lstrip().startswith("-"):
        return f"{fault}, and XLA_FLAGS names a file: {mend}, or write {_FLAG}= into {flags.strip()}"
    os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}=".strip()
    return f"{fault}; funcollect turned them off with XLA_FLAGS={_FLAG}=: {mend}"


def _jaxlib_version() -> str | None:
    """The version of the installed jaxlib; None if there is none."""
    return next((found.version for found in metadata.distributions(name="jaxlib")), None)


def _has_client() -> bool:
    """Whether JAX has made a client in this process, so that XLA has read its flags."""
    xla_bridge = sys.modules.get("jax._src.xla_bridge")
    return xla_bridge is not None and xla_bridge.backends_are_initialized()
