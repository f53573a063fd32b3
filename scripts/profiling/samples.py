"""Turn the samples of a size into the records of its parts and of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.costs import Cost
from lab.sizes import Size
from lab.timing import Spread, paired_ratio

from .records import Part, Pass, SumOfParts

# The name of a part ("whole", "AdamW" and "smallest" included), and of one of its passes.
Key = tuple[str, str]

# The passes of the parts, and those of the whole.
PART_PASSES = ("forward", "backward", "train")
WHOLE_PASSES = (*PART_PASSES, "step")


@dataclass(frozen=True)
class Samples:
    """Seconds per call of each part and pass.

    seconds: one sample for each round.
    gpu_seconds: of the GPU alone; empty on a CPU, and without the passes of too many launches.
    """

    seconds: Mapping[Key, list[float]]
    gpu_seconds: Mapping[Key, list[float]]

    def timed(self, part: str, name: str, cost: Cost) -> Pass:
        """Return the record of one pass."""
        on_gpu = None
        if (part, name) in self.gpu_seconds:
            on_gpu = Spread.of(self.gpu_seconds[part, name])
        return Pass(Spread.of(self.seconds[part, name]), on_gpu, cost)


def with_backward(
    samples: Mapping[Key, list[float]],
) -> dict[Key, list[float]]:
    """Add the backward passes: what forward and backward take longer than forward, round by round."""
    found = dict(samples)
    for (part, name), seconds in samples.items():
        if name == "train" and (part, "forward") in samples:
            rounds = zip(seconds, samples[part, "forward"], strict=True)
            found[part, "backward"] = [both - forward for both, forward in rounds]
    return found


def part_records(samples: Samples, size: Size, element_size: int) -> tuple[Part, ...]:
    """Return the record of each part of a size."""
    parts = []
    for name, costs in size.part_costs(element_size).items():
        passes = {}
        for pass_name, cost in costs.items():
            if (name, pass_name) in samples.seconds:
                passes[pass_name] = samples.timed(name, pass_name, cost)
        parts.append(Part(name, size.count(name), passes))
    return tuple(parts)


def whole_record(samples: Samples, size: Size, element_size: int) -> Part:
    """Return the record of the whole."""
    passes = {}
    for name in WHOLE_PASSES:
        if ("whole", name) in samples.seconds:
            # Backward is no mode of its own.
            cost_of = size.pass_cost if name == "backward" else size.costs
            cost = cost_of(name, element_size)
            passes[name] = samples.timed("whole", name, cost)
    return Part("whole", 1, passes)


def optimizer_record(samples: Samples, size: Size, element_size: int) -> Part | None:
    """Return the record of AdamW; None if it was not timed."""
    if ("AdamW", "optimizer") not in samples.seconds:
        return None
    cost = size.pass_cost("optimizer", element_size)
    update = samples.timed("AdamW", "optimizer", cost)
    return Part("AdamW", 1, {"optimizer": update})


def sums_of_parts(samples: Samples, parts: Sequence[Part]) -> dict[str, SumOfParts]:
    """Return the times of all parts added up, for each pass that the parts have."""
    sums = {}
    for name in PART_PASSES:
        if ("whole", name) in samples.seconds:
            of_whole = samples.seconds["whole", name]
            total = [0.0] * len(of_whole)
            for part in parts:
                rounds = zip(total, samples.seconds[part.name, name], strict=True)
                total = [before + part.count * seconds for before, seconds in rounds]
            ratio = paired_ratio(total, of_whole)
            sums[name] = SumOfParts(Spread.of(total), ratio)
    return sums


def overhead_of(samples: Samples) -> dict[str, Spread]:
    """Return the times of the same calls on a tiny input, by pass."""
    found = {}
    for (part, name), seconds in samples.seconds.items():
        if part == "smallest" and name != "backward":
            found[name] = Spread.of(seconds)
    return found
