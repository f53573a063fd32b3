"""What a run of compare_peers.py measured, as records, and the JSON file that holds them."""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.files import read_json, write_json

SCHEMA = "tinyblock.compare_peers/4"
# Disagrees: its results differ too much to be timed. Skipped: it cannot run here. Missing: no time was left.
STATUSES = ("measured", "disagrees", "failed", "skipped", "missing")

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(kw_only=True)
class Needs:
    """What a layer needs beside time.

    saved_bytes: kept for backward, apart from weights.
    peak_bytes: the most memory that a call adds; None on a CPU and for CUDA graphs.
    kernels: started by one call; None if they were not counted, or none was seen.
    kernels_error: why counting the kernels failed.
    """

    saved_bytes: int
    peak_bytes: int | None = None
    kernels: int | None = None
    kernels_error: str | None = None


@dataclass(kw_only=True)
class Measurement:
    """A peer beside the Block: the seconds per call of each, one pair for each round.

    `errors` are relative to the Block's outputs and input gradients. It is None for a peer whose outputs differ by
    design.
    """

    errors: dict[str, float] | None
    needs: Needs
    block_seconds: list[float]
    peer_seconds: list[float]

    def __post_init__(self) -> None:
        rounds = len(self.block_seconds)
        if rounds == 0 or rounds != len(self.peer_seconds):
            raise ValueError(
                "block_seconds and peer_seconds must have one time for each round, "
                f"got {rounds} and {len(self.peer_seconds)}"
            )
        shortest = min(self.block_seconds + self.peer_seconds)
        if shortest <= 0:
            raise ValueError(f"times must be positive, got {shortest}")


@dataclass(kw_only=True)
class Row:
    """A peer in a case. `measurement` is None unless the status is "measured"; otherwise `reason` says why.

    `project` is True for a layer of another project. `target` is the largest ratio allowed; None is not judged.
    """

    peer: str
    title: str
    version: str | None
    project: bool
    target: float | None
    status: str
    reason: str = ""
    measurement: Measurement | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(
                f"status must be one of {', '.join(STATUSES)}, got {self.status!r}"
            )
        if (self.status == "measured") != (self.measurement is not None):
            raise ValueError(f"{self.peer} must have a measurement if it was measured")


@dataclass(kw_only=True)
class CaseResult:
    """The result of a case: the Block and its peers. `failure` says why the Block itself did not run.

    `causal_flops` counts the scores that a causal mask leaves, and `dense_flops` counts all scores.
    """

    name: str
    summary: str
    description: str
    work: str
    dtype: str
    causal_flops: int
    dense_flops: int
    needs: Needs | None = None
    failure: str | None = None
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise ValueError(f"dtype must be one of {known}, got {self.dtype!r}")
        if self.needs is None and any(row.measurement for row in self.rows):
            raise ValueError(f"{self.name} must have the needs of the Block")


@dataclass(kw_only=True)
class Run:
    """One process of compare_peers.py. `interrupted` is True until its last case is finished."""

    environment: dict[str, object]
    rounds: int
    quick: bool
    shape_checks: bool
    interrupted: bool = True
    cases: list[CaseResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        for fact in ("device", "command", "date", "seed"):
            if fact not in self.environment:
                raise ValueError(f"environment must have {fact!r}")


def write(path: Path, run: Run) -> None:
    """Write a run as JSON."""
    write_json(path, {"schema": SCHEMA, **dataclasses.asdict(run)})


def read(path: Path) -> Run:
    """Read a run from JSON.

    Raises:
        ValueError: the file cannot be read, has another schema, or is damaged.
    """
    document = read_json(path, SCHEMA, "--report")
    del document["schema"]
    try:
        return _record(Run, document, "the file")
    except ValueError as error:
        raise ValueError(
            f"--report: {path} is damaged: {error}; measure again with --json"
        ) from None


def _record(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON object as a dataclass."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {value!r}")
    fields = {each.name for each in dataclasses.fields(kind)}
    if value.keys() != fields:
        differ = ", ".join(sorted(value.keys() ^ fields))
        raise ValueError(f"{where} lacks or adds {differ}")
    kinds = typing.get_type_hints(kind)
    values = {
        name: _value(kinds[name], value[name], f"{where}: {name}") for name in fields
    }
    return kind(**values)


def _value(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON value as a dataclass, a list, a dict, an optional value or a plain type."""
    arguments = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, where)
    if isinstance(kind, types.UnionType):  # such as float | None
        return None if value is None else _value(arguments[0], value, where)
    if kind is object:
        return value
    expected = typing.get_origin(kind) or kind
    if expected is float and type(value) is int:
        value = float(value)
    if type(value) is not expected:
        raise ValueError(f"{where} must be {expected.__name__}, got {value!r}")
    if expected is float and not math.isfinite(value):
        raise ValueError(f"{where} must be finite, got {value}")
    if expected is list:
        return [_value(arguments[0], item, where) for item in value]
    if expected is dict:
        return {key: _value(arguments[1], item, where) for key, item in value.items()}
    return value
