"""Breaks lines of the package on purpose, one at a time, and counts how many of them the tests notice.

`python -m benchmarks.house.breaks --out FILE` draws sixty breaks with a fixed seed (`--list` shows them). For each,
it runs the tests of the folder that it is in, and if these pass all others. Every result is one line of FILE. Breaks
that are there already are not run again, so a run may be interrupted. The work is done in a copy of the committed tree.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COUNT, SEED = 60, 20261128
LIMIT = 3_600  # seconds for the tests of one break; a test that waits for ever has noticed it
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COPIES = ("clone", "copy", "deepcopy")


class Break(NamedTuple):
    """One changed expression."""

    file: str  # from the root of the project
    line: int
    kind: str
    before: str
    after: str
    span: tuple[int, int, int, int]  # first line and column, last line and column


def _changed(node: ast.AST) -> tuple[str, ast.AST] | None:
    """The kind of the break and the expression in place of `node`; None if there is none."""
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in _SWAPPED and not isinstance(left, ast.Constant):
            return "sign", ast.BinOp(left, _SWAPPED[type(operator)](), right)  # type: ignore[arg-type]
        case ast.Compare(left, [operator], [right]) if type(operator) in _SWAPPED:
            return "condition", ast.Compare(left, [_SWAPPED[type(operator)]()], [right])  # type: ignore[list-item]
        case ast.BoolOp(operator, values):
            return "condition", ast.BoolOp(_SWAPPED[type(operator)](), values)  # type: ignore[arg-type]
        case ast.UnaryOp(ast.Not(), operand):
            return "condition", operand
        case ast.Subscript(value, ast.Constant(int(number)), context):
            return "index", ast.Subscript(value, ast.Constant(number + 1), context)
        case ast.Subscript(value, ast.Slice(ast.expr() as lower, upper, step), context):
            return "index", ast.Subscript(
                value, ast.Slice(ast.BinOp(lower, ast.Add(), ast.Constant(1)), upper, step), context
            )
        case ast.Call(ast.Attribute(value, name), []) if name in _COPIES:
            return "copy", value
    return None


def _breaks(path: Path) -> Iterator[Break]:
    """All breaks of a file, but for annotations, which nothing runs."""
    source = path.read_text()
    tree = ast.parse(source)
    annotations = {
        id(inner)
        for node in ast.walk(tree)
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if note is not None
        for inner in ast.walk(note)
    }
    for node in ast.walk(tree):
        if id(node) in annotations or not isinstance(node, ast.expr) or (found := _changed(node)) is None:
            continue
        kind, other = found
        span = (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
        after = f"({ast.unparse(other)})"
        yield Break(path.relative_to(ROOT).as_posix(), node.lineno, kind, ast.unparse(node), after, span)


def drawn() -> list[Break]:
    """The breaks: fifteen of each kind."""
    every = [each for path in sorted((ROOT / "funcollect").rglob("*.py")) for each in _breaks(path)]
    kinds = sorted({each.kind for each in every})
    chosen = random.Random(SEED)
    return [each for kind in kinds for each in chosen.sample([e for e in every if e.kind == kind], COUNT // len(kinds))]


def broken(source: str, change: Break) -> str:
    """The source with the change."""
    first, begin, last, end = change.span
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    head, tail = lines[first - 1][:begin], lines[last - 1][end:]
    return b"".join([*lines[: first - 1], head, change.after.encode(), tail, *lines[last:]]).decode()


def _passes(tree: Path, tests: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        run = subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return False
    return run.returncode in (0, 5)


def noticed(tree: Path, change: Break) -> str:
    """What noticed a break: the tests of its folder, all others, or nothing."""
    path = tree / change.file
    source = path.read_text()
    path.write_text(broken(source, change))
    try:
        folder = Path(change.file).parts[1]
        own = f"tests/{folder}" if (tree / "tests" / folder).is_dir() else "tests/core"
        if not _passes(tree, [own, change.file]):
            return "folder"
        return "nothing" if _passes(tree, ["tests", "funcollect", f"--ignore={own}"]) else "others"
    finally:
        path.write_text(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the results go")
    parser.add_argument("--list", action="store_true", help="show the breaks, and run nothing")
    arguments = parser.parse_args()
    breaks = drawn()
    if arguments.list or arguments.out is None:
        print("\n".join(f"{each.kind:10} {each.file}:{each.line}  {each.before}  ->  {each.after}" for each in breaks))
        return
    done = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    known = {(each["file"], tuple(each["span"])) for each in done}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
        for change in breaks:
            if (change.file, change.span) in known:
                continue
            done.append({**change._asdict(), "noticed": noticed(tree, change)})
            with arguments.out.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(f"{done[-1]['noticed']:8} {change.kind:10} {change.file}:{change.line}")
    caught = sum(each["noticed"] != "nothing" for each in done)
    print(f"{caught} of {len(done)} breaks noticed")


if __name__ == "__main__":
    main()
