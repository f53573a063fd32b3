"""How long the parts and the whole take, beside the rates of the machine."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from lab.tables import share
from lab.timing import Sampler, Spread, interleave, wall_sampler

from .parts import PartTime, Stopwatch
from .roofline import Row, rate_samplers
from .subject import Subject

NOISE = 0.2  # what varies by more is named


@dataclass(frozen=True)
class Times:
    """Samples that were taken in the same rounds.

    whole: seconds of a run, for each round.
    parts: the times of the parts by name, for each round.
    rates: seconds per FLOP, byte and small operation, by name, for each round.
    """

    whole: list[float]
    parts: list[dict[str, PartTime]]
    rates: dict[str, list[float]]

    @classmethod
    def take(cls, subject: Subject, dtypes: Iterable[torch.dtype]) -> "Times":
        """Measure the parts, the whole, and the rates of the machine in turns."""
        settings = subject.settings
        stopwatch = Stopwatch(subject.model, settings.on_gpu)
        of_rates = rate_samplers(settings.device, dtypes)
        samplers: dict[str, Sampler] = {
            "parts": stopwatch.sampler(subject.run_parts),
            "whole": wall_sampler(subject.run_whole),
            **of_rates,
        }
        samples = interleave(samplers, settings.rounds)
        return cls(
            whole=samples["whole"],
            parts=stopwatch.taken,
            rates={name: samples[name] for name in of_rates},
        )

    def set_on(self, row: Row) -> None:
        """Set the times of a part."""
        total = Spread.of([times[row.name].total for times in self.parts])
        forward = Spread.of([times[row.name].forward for times in self.parts])
        row.total_s, row.p20_s, row.varies = total.median, total.p20, total.width
        row.forward_s = forward.median

    def rest(self, rows: list[Row]) -> list[float]:
        """Return the time that the rows leave of the whole, for each round."""
        rounds = zip(self.whole, self.parts, strict=True)
        return [
            whole - sum(parts[row.name].total for row in rows)
            for whole, parts in rounds
        ]

    def noise(self, rows: list[Row], whole: Row, rest_varies: float) -> list[str]:
        """Name what varies by more than 20%: rates, large parts, the whole, and the rest.

        A part is large from 5% of the whole. The rest varies in shares of the whole.
        """
        varies = {name: Spread.of(times).width for name, times in self.rates.items()}
        for row in (*rows, whole):
            if row.total_s > 0.05 * whole.total_s:
                varies[row.name] = row.varies
        noisy = [
            f"{name} by {share(wide, 2)}"
            for name, wide in varies.items()
            if wide > NOISE
        ]
        if rest_varies > NOISE:
            noisy.append(f"rest by {share(rest_varies, 2)} of the total")
        if not noisy:
            return []
        return [f"NOISY: {', '.join(noisy)} (p20 to p80); close other programs"]
