"""What a run of compare_peers.py measured, as records, and the JSON file that holds them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from lab.environment import Environment
from lab.files import read_json, write_json
from lab.records import from_plain, to_plain

SCHEMA = "tinyblock.compare_peers/4"
# Disagrees: its results differ too much to be timed. Skipped: it cannot run here. Missing: no time was left.
Status = Literal["measured", "disagrees", "failed", "skipped", "missing"]


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
    block_seconds: tuple[float, ...]
    peer_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rounds = len(self.block_seconds)
        if rounds == 0 or rounds != len(self.peer_seconds):
            raise ValueError(
                "block_seconds and peer_seconds must have one time for each round, "
                f"got {rounds} and {len(self.peer_seconds)}"
            )
        for seconds in self.block_seconds + self.peer_seconds:
            if not 1e-9 <= seconds <= 1e9:
                raise ValueError(f"times must be from 1e-9 to 1e9 s, got {seconds}")
        if self.errors is not None and "outputs" not in self.errors:
            raise ValueError('errors must have the key "outputs", or be null')


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
    status: Status
    reason: str = ""
    measurement: Measurement | None = None

    def __post_init__(self) -> None:
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
    dtype: torch.dtype
    causal_flops: int
    dense_flops: int
    needs: Needs | None = None
    failure: str | None = None
    rows: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        if self.needs is None and any(row.measurement for row in self.rows):
            raise ValueError(f"{self.name} must have the needs of the Block")


@dataclass(kw_only=True)
class Run:
    """One process of compare_peers.py. `interrupted` is True until its last case is finished."""

    environment: Environment
    rounds: int
    quick: bool
    shape_checks: bool
    interrupted: bool = True
    cases: tuple[CaseResult, ...] = ()
    schema: str = SCHEMA


def write(path: Path, run: Run) -> None:
    """Write a run as JSON."""
    write_json(path, to_plain(run))


def read(path: Path) -> Run:
    """Read a run from JSON.

    Raises:
        ValueError: the file cannot be read, has another schema, or is damaged.
    """
    document = read_json(path, SCHEMA, "--report", "compare_peers.py --json")
    try:
        return from_plain(Run, document)
    except ValueError as error:
        raise ValueError(
            f"--report: {path} is damaged: {error}; measure again with --json"
        ) from None
