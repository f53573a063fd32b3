"""Change a module in one place at a time, and print the changes that its tests do not notice.

A change replaces an operator, a comparison, a condition or a number, leaves a keyword
argument out, or exchanges two arguments. Annotations and errors stay. The changes are drawn
at random, each time the same, and made in a copy of the checkout. The test file of the
module's name runs first, and the others only if it does not notice a change. For a change
that is printed, a test is missing, or the code is not needed, or no user can see a
difference. Run it in the root of the checkout, with the paths of files from there.
"""

import argparse
import ast
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

# The longest of these with which the path of a file begins names its tests.
TESTS = {
    "tinyblock/contract": ["tests/verify", "tinyblock/contract"],
    "tinyblock/copies": ["tests/copy"],
    "tinyblock/parallelize": ["tests/parallelize"],
    "tinyblock/typecheck": ["tests/typecheck"],
    "tinyblock/verify": ["tests/verify"],
    "tinyblock_command": ["tests/copy"],
    "tinyblock": ["tinyblock/contract", "tests/layers"],
    "scripts/accuracy": ["tests/compare"],
    "scripts/compare": ["tests/compare", "tests/test_figures.py"],
    "scripts/diverg": ["tests/diverge"],  # diverge.py, diverging/
    "scripts/mutants": ["tests/lab"],
    "scripts/peers": ["tests/compare"],
    "scripts": ["tests/profiling", "tests/lab"],
    "examples": ["tests/examples"],
}
PAIRS: Any = {
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
    ast.FloorDiv: ast.Mod,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
EXCHANGED = PAIRS | {second: first for first, second in PAIRS.items()}


def code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield each part of a program but annotations, errors, and texts."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    yield node
    annotations = {getattr(node, "annotation", None), getattr(node, "returns", None)}
    for child in ast.iter_child_nodes(node):
        if child not in annotations:
            yield from code(child)


def changes(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each expression of a node that can be changed, and what replaces it."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in EXCHANGED:
            yield node, ast.BinOp(left, EXCHANGED[type(op)](), right)
        case ast.BoolOp(op, values):
            yield node, ast.BoolOp(EXCHANGED[type(op)](), values)
        case ast.Compare(left, ops, right):
            for index, comparison in enumerate(ops):
                changed = ops.copy()
                changed[index] = EXCHANGED[type(comparison)]()
                yield node, ast.Compare(left, changed, right)
        case ast.UnaryOp(ast.USub() | ast.Not(), operand):
            yield node, operand
        # An operator in a condition is changed itself.
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if not isinstance(
            test, ast.Compare | ast.BoolOp | ast.UnaryOp
        ):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield node, ast.Constant(value + 1)
        case ast.Call():
            yield from ((node, call) for call in calls(node))


def calls(node: ast.Call) -> Iterator[ast.Call]:
    """Yield the call with two neighbors exchanged, or without a keyword."""
    for index in range(1, len(node.args)):
        args = node.args.copy()
        args[index - 1], args[index] = args[index], args[index - 1]
        if ast.dump(args[index - 1]) != ast.dump(args[index]):
            yield ast.Call(node.func, args, node.keywords)
    for index in range(len(node.keywords)):
        keywords = node.keywords.copy()
        del keywords[index]
        yield ast.Call(node.func, node.args, keywords)


def replace(source: str, old: ast.expr, new: ast.expr) -> str:
    """Return the source with one expression replaced."""
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    end: Any = old.end_lineno
    before = b"".join(lines[: old.lineno - 1]) + lines[old.lineno - 1][: old.col_offset]
    after = lines[end - 1][old.end_col_offset :] + b"".join(lines[end:])
    return (before + f"({ast.unparse(new)})".encode() + after).decode()


def passes(tests: list[str], checkout: str, seconds: float | None = None) -> bool:
    """Run the tests; those that do not end in so many seconds do not pass."""
    # Without bytecode: Python may take a file that changes twice in a second from its cache.
    settings = {"PYTHONPATH": checkout, "PYTHONDONTWRITEBYTECODE": "1"}
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run(
            [*pytest, *tests],
            cwd=checkout,
            env=os.environ | settings,
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def runs_of(files: list[str]) -> list[list[str]]:
    """Return the tests of each run: those of the files' names, and then all of the room.

    There is none if TESTS does not name the room of the first file.
    """
    rooms = [path for path in TESTS if files[0].startswith(path)]
    if not rooms:
        return []
    folders = TESTS[max(rooms, key=len)]
    names = {f"test_{Path(file).stem}.py" for file in files}
    pages = [path for folder in folders for path in Path(folder).rglob("test_*.py")]
    named = [str(path) for path in pages if path.name in names]
    return [named, folders] if named else [folders]


def draw(sources: dict[str, str], count: int) -> list[tuple[str, ast.expr, ast.expr]]:
    """Return files, expressions in them, and what replaces these."""
    possible = [
        (file, old, new)
        for file, source in sources.items()
        for node in code(ast.parse(source))
        for old, new in changes(node)
    ]
    return random.Random(0).sample(possible, min(count, len(possible)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE", help="of one module")
    parser.add_argument("--tests", nargs="+", help="run these tests", metavar="PATH")
    parser.add_argument("--draws", type=int, default=60, help="make so many changes")
    args = parser.parse_args()
    for file in args.files:
        if Path(file).is_absolute() or ".." in Path(file).parts:
            parser.error(
                f"FILE must be a path from the root of the checkout, got {file}"
            )
    runs = [args.tests] if args.tests else runs_of(args.files)
    if not runs:
        parser.error(f"{args.files[0]} has no tests in TESTS; name some with --tests")
    sources = {file: Path(file).read_text() for file in args.files}
    drawn = draw(sources, args.draws)
    noticed = 0
    with tempfile.TemporaryDirectory() as checkout:
        ignored = shutil.ignore_patterns(".venv*", "__pycache__")
        shutil.copytree(".", checkout, ignore=ignored, dirs_exist_ok=True)
        start = time.monotonic()
        for tests in runs:
            if not passes(tests, checkout):
                sys.exit("The tests must pass before a change: " + " ".join(tests))
        seconds = time.monotonic() - start
        minutes = math.ceil(len(drawn) * seconds / 60)
        print(f"{len(drawn)} changes take about {minutes} min at most", file=sys.stderr)
        limit = 60 + 3 * seconds  # a change may make a loop endless
        for file, old, new in tqdm(drawn, unit="change", disable=None):  # at a terminal
            Path(checkout, file).write_text(replace(sources[file], old, new))
            if all(passes(tests, checkout, limit) for tests in runs):
                change = f"{ast.unparse(old)}  ->  {ast.unparse(new)}"
                tqdm.write(f"{file}:{old.lineno}: {change}")
            else:
                noticed += 1
            Path(checkout, file).write_text(sources[file])
    print(f"The tests notice {noticed} of {len(drawn)} changes.")


if __name__ == "__main__":
    main()
