"""The order of events of a profile: measure ceilings and sizes, write them after each size, and show them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from lab.environment import device_name, environment
from lab.machine import DATASHEETS, Ceilings, Rates, measure_ceilings
from lab.processes import from_first, is_first
from lab.progress import Progress
from lab.sizes import Size
from lab.tables import show
from lab.timing import Clock, clock

from .analysis import beats_ceilings
from .measure import measure
from .outputs import Outputs
from .records import (
    DistributedPoint,
    OutOfMemory,
    Point,
    Profile,
    Settings,
)
from .report import report
from .report_distributed import distributed_report
from .storage import write_profile


def profile(
    sizes: Sequence[Size], settings: Settings, outputs: Outputs, clock: Clock = clock
) -> int:
    """Measure the sizes, write and show the result, and return the exit code of the program.

    `outputs.errors` then has the files that could not be written.
    """
    with Progress() as progress:
        found = _measure_all(sizes, settings, outputs, progress, clock)
    measured = [each for each in found.points if not isinstance(each, OutOfMemory)]
    if is_first():
        _show(found, outputs, has_picture=bool(measured))
    if not found.finished:
        return 130
    return 0 if measured else 1


def _measure_all(
    sizes: Sequence[Size],
    settings: Settings,
    outputs: Outputs,
    progress: Progress,
    clock: Clock,
) -> Profile:
    """Return the profile of all sizes, or of those that were finished before Ctrl-C."""
    progress.start("measuring the ceilings")
    profile = Profile(
        environment=environment(settings.device, settings.seed),
        settings=settings,
        ceilings=_ceilings(settings, clock),
        datasheet=_datasheet(settings.device, settings.dtype),
    )
    measured_again = False
    for index, size in enumerate(sizes, 1):
        if settings.sweep is not None:
            progress.prefix = f"{index}/{len(sizes)} "
        try:
            point = _measure(size, settings, outputs, progress, clock)
            points = (*profile.points, point)
            profile = replace(profile, points=points, finished=index == len(sizes))
            _write(profile, outputs)
            if beats_ceilings(profile) and not measured_again:
                measured_again = True
                profile = _with_ceilings_again(profile, progress, clock)
                _write(profile, outputs)
        except KeyboardInterrupt:
            if not profile.points:
                raise
            profile = replace(profile, finished=False)
            break
    return profile


def _write(profile: Profile, outputs: Outputs) -> None:
    """Write what is measured so far: if the process is killed, the file has the sizes that are finished."""
    if outputs.json is not None and is_first():
        with outputs.writing(outputs.json):
            write_profile(outputs.json, profile)


def _with_ceilings_again(profile: Profile, progress: Progress, clock: Clock) -> Profile:
    """Measure the ceilings again, because a part is faster: the machine may have been busy before.

    Of each ceiling, the higher measurement counts: other work on the machine only lowers it.
    """
    progress.start("measuring the ceilings again")
    first, second = profile.ceilings, _ceilings(profile.settings, clock)
    products = max(first, second, key=lambda each: each.flops_per_second.median)
    copies = max(first, second, key=lambda each: each.bytes_per_second.median)
    ceilings = replace(products, bytes_per_second=copies.bytes_per_second)
    return replace(profile, ceilings=ceilings)


def _measure(
    size: Size,
    settings: Settings,
    outputs: Outputs,
    progress: Progress,
    clock: Clock,
) -> Point | DistributedPoint | OutOfMemory:
    if settings.mesh.processes == 1:
        return measure(size, settings, outputs, progress, clock)
    # torch.distributed takes seconds to import.
    from .distributed import measure_distributed

    # _check has rejected a trace and a memory snapshot of several processes.
    with torch.set_grad_enabled(settings.train):
        return measure_distributed(size, settings, progress, clock)


def _show(profile: Profile, outputs: Outputs, has_picture: bool) -> None:
    """Show the report, and then draw the picture: if one of them fails, the other one is not lost."""
    several = profile.settings.mesh.processes > 1
    try:
        show(distributed_report(profile) if several else report(profile))
    finally:
        if outputs.plot is not None and has_picture:
            # It imports matplotlib.
            from .plot import plot

            with outputs.writing(outputs.plot):
                plot(profile, outputs.plot)


def _ceilings(settings: Settings, clock: Clock) -> Ceilings:
    def measure() -> Ceilings:
        return measure_ceilings(settings.device, settings.dtype, clock=clock)

    return from_first(measure)


def _datasheet(device: torch.device, dtype: torch.dtype) -> Rates | None:
    """Return the peaks of this very device; None if they are unknown."""
    sheet = DATASHEETS.get(device_name(device))
    if sheet is None or sheet.flops_per_second(dtype) is None:
        return None
    return sheet.rates(dtype)
