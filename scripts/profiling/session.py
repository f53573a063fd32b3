"""The order of events of a profile: measure ceilings and sizes, write them after each size, and show them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import config as jaxtyping_config
from lab.environment import device_name, environment
from lab.files import write_json
from lab.machine import DATASHEETS, Ceilings, Datasheet, measure_ceilings
from lab.processes import from_first, is_first
from lab.progress import Progress
from lab.sizes import Size
from lab.tables import show
from lab.timing import Clock

from .compare import SCHEMA
from .measure import measure
from .records import Settings
from .report import report
from .report_distributed import distributed_report


@dataclass(frozen=True)
class Outputs:
    """The files that a profile writes; None: not written."""

    json: Path | None = None
    plot: Path | None = None
    trace: Path | None = None
    memory_snapshot: Path | None = None


def profile(
    sizes: Sequence[Size], settings: Settings, outputs: Outputs, clock: Clock
) -> int:
    """Measure the sizes, write and show the result, and return the exit code of the program."""
    with Progress() as progress:
        progress.start("measuring the ceilings")
        ceilings = from_first(
            lambda: measure_ceilings(settings.device, settings.dtype, clock=clock)
        )
        sheet = DATASHEETS.get(device_name(settings.device))
        document = _document(settings, ceilings, sheet)
        interrupted = False
        for index, size in enumerate(sizes, 1):
            if settings.sweep is not None:
                progress.prefix = f"{index}/{len(sizes)} "
            try:
                point = _measured(
                    size, settings, outputs, ceilings, sheet, progress, clock
                )
            except KeyboardInterrupt:
                if not document["points"]:
                    raise
                interrupted = True
                break
            document["points"].append(point)
            document["status"] = "ok" if index == len(sizes) else "interrupted"
            if outputs.json is not None and is_first():
                # After every size: if the process is killed, the file has those that are finished.
                write_json(outputs.json, document)
    measured = [point for point in document["points"] if "whole" in point]
    if is_first():
        _show(document, settings, outputs.plot if measured else None)
    if interrupted:
        return 130
    return 0 if measured else 1


def _measured(
    size: Size,
    settings: Settings,
    outputs: Outputs,
    ceilings: Ceilings,
    sheet: Datasheet | None,
    progress: Progress,
    clock: Clock,
) -> dict[str, Any]:
    if settings.mesh.processes == 1:
        return measure(
            size,
            settings,
            ceilings,
            sheet,
            progress,
            clock,
            outputs.trace,
            outputs.memory_snapshot,
        )
    # torch.distributed takes seconds to import.
    from .distributed import measure_distributed

    with torch.set_grad_enabled(settings.train):
        return measure_distributed(size, settings, ceilings, progress, clock)


def _show(document: dict[str, Any], settings: Settings, path: Path | None) -> None:
    """Show the report, and then draw the picture: if one of them fails, the other one is not lost."""
    several = settings.mesh.processes > 1
    try:
        show(distributed_report(document) if several else report(document))
    finally:
        if path is not None:
            # It imports matplotlib.
            from .plot import plot

            plot(document, path)


def _document(
    settings: Settings, ceilings: Ceilings, sheet: Datasheet | None
) -> dict[str, Any]:
    """Return a document that has all but its points."""
    return {
        "schema": SCHEMA,
        "status": "ok",
        "environment": environment(settings.device, settings.seed),
        "settings": {
            "dtype": str(settings.dtype).removeprefix("torch."),
            "mode": settings.mode,
            "compile": settings.compile or None,
            "rounds": settings.rounds,
            "seed": settings.seed,
            "preset": settings.preset,
            "device": str(settings.device),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "mesh": asdict(settings.mesh),
            "shape_checks": not jaxtyping_config.jaxtyping_disable,
            "sweep": settings.sweep,
        },
        "ceilings": {
            **asdict(ceilings),
            "ridge": ceilings.ridge,
            "datasheet": sheet and asdict(sheet.rates(settings.dtype)),
        },
        "points": [],
    }
