"""Trees of two revisions of the package, both with the benchmarks of the repository as it is now."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PACKAGE, BENCHMARKS = "funcollect", "benchmarks"
_UNUSED = shutil.ignore_patterns("__pycache__", "results")


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A folder that holds one revision's package.

    Args:
        commit: full hash.
        changed: whether the package differs from the commit.
    """

    path: Path
    commit: str
    changed: bool

    def __str__(self) -> str:
        return f"{self.commit}{' with uncommitted changes' if self.changed else ''}"


@contextlib.contextmanager
def trees(repository: Path, before: str, after: str | None) -> Iterator[tuple[Tree, Tree]]:
    """Both revisions in temporary folders, which are removed at the end, also after an error.

    The benchmarks of `repository` replace those of the revisions: both then do the same work by construction, and a
    revision that is older than a benchmark can be measured with it.

    Args:
        repository: its root.
        before: a revision, as git names them.
        after: another one, or None for the package as it is, with what is not committed.

    Raises:
        ValueError: git knows no such revision.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-"))).resolve()
        first, second = folder / "1", folder / "2"  # of the same length, on which the layout of memory depends
        worktree = partial(_worktree, repository)
        old = stack.enter_context(worktree(before, first))
        new = stack.enter_context(worktree(after, second)) if after else _copy(repository, second)
        for tree in (old, new):
            shutil.rmtree(tree.path / BENCHMARKS, ignore_errors=True)
            shutil.copytree(repository / BENCHMARKS, tree.path / BENCHMARKS, ignore=_UNUSED)
        yield old, new


@contextlib.contextmanager
def _worktree(repository: Path, revision: str, path: Path) -> Iterator[Tree]:
    commit = _commit(repository, revision)
    try:
        _git(repository, "worktree", "add", "--quiet", "--detach", str(path), commit)
        yield Tree(path=path, commit=commit, changed=False)
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):  # there is none if adding it failed
            _git(repository, "worktree", "remove", "--force", "--force", str(path))  # locked, if adding was interrupted
        _git(repository, "worktree", "prune")


def _copy(repository: Path, path: Path) -> Tree:
    """A copy, so that edits during a long comparison do not change what is measured."""
    shutil.copytree(repository / PACKAGE, path / PACKAGE, ignore=_UNUSED)
    changed = bool(_git(repository, "status", "--porcelain", "--", PACKAGE))
    return Tree(path=path, commit=_commit(repository, "HEAD"), changed=changed)


def _commit(repository: Path, revision: str) -> str:
    try:
        return _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{revision!r} is no revision of {repository}: name a commit, a branch or a tag") from error


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr.strip())
        raise
