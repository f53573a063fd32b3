"""Predictions as text: what they follow from, and a headline and a table for each size."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lab.machine import Rates
from lab.tables import Section, Table, number, share, si

from .predict import Links, Prediction, Work
from .report import describe

_BOUND = (
    "Lower bounds on time: no run is faster. For comparison, published runs of Llama 3.1 on H100 GPUs take 2.0 to 3.3\n"
    "times their bound; docs/scaling.md compares them, and lists what the bound leaves out."
)
_LEGEND = (
    "Compute: time of computation. tp, dp: time of the transfers along each axis. Not hidden: time for which the\n"
    "computation waits for transfers. States: weights, gradients and moments on a device, without activations."
)
_COLUMNS = (
    "mesh",
    "devices",
    "tokens each",
    "states",
    "time",
    "compute",
    "tp",
    "dp",
    "not hidden",
    "MFU",
    "tokens/s",
    "tokens/s each",
)
_NOUNS = {
    "forward": "a forward pass",
    "train": "a forward and backward pass",
    "step": "a training step",
}


@dataclass(frozen=True)
class Basis:
    """What predictions follow from: `source` names the device with these rates."""

    dtype: str
    work: Work
    source: str
    rates: Rates
    links: Links

    def lines(self) -> list[str]:
        """Return the work, the rates of a device, and the links, a line each."""
        recomputed = ", each block recomputed" if self.work.recompute else ""
        flops = si(self.rates.flops_per_second, "FLOP/s")
        moved = si(self.rates.bytes_per_second, "B/s")
        within = si(self.links.within, "B/s")
        links = f"Links: each device receives {within} from its own machine"
        if self.links.between is not None:
            between = si(self.links.between, "B/s")
            links += (
                f" of {self.links.per_machine} devices, {between} from other machines"
            )
        return [
            f"{self.dtype}, mode {self.work.mode}{recomputed}",
            f"Ceilings of {self.source}: {flops}, {moved}",
            links,
        ]


def prediction_report(basis: Basis, predictions: Sequence[Prediction]) -> list[Section]:
    """Return the sections of the predictions: what they follow from, and a headline and a table for each size."""
    sections: list[Section] = ["\n".join([_BOUND, *basis.lines()])]
    for size, group in groupby(predictions, key=lambda each: each.size):
        of_size = list(group)
        table = Table(describe(size), _COLUMNS)
        table.rows = [_row(prediction) for prediction in of_size]
        sections += [_headline(of_size, basis.work.mode), table]
    return [*sections, _LEGEND]


def duration(seconds: float) -> str:
    """Write a time with its unit, so that a short one does not become 0.00."""
    if seconds == 0:
        return "0"
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if factor * seconds >= 0.9995:
            return f"{number(factor * seconds)} {unit}"
    return f"{number(1e9 * seconds)} ns"


def _in_words(count: float) -> str:
    """Write a large count, such as 8.03 billion."""
    words = {1e12: "trillion", 1e9: "billion", 1e6: "million", 1e3: "thousand"}
    for factor, word in words.items():
        if count >= 0.9995 * factor:
            return f"{number(count / factor)} {word}"
    return f"{count:.0f}"


def _headline(predictions: Sequence[Prediction], mode: str) -> str:
    """Return the size of the model, and the time and the rate of its fastest mesh."""
    best = min(predictions, key=lambda each: each.seconds)
    mesh = f"On {best.mesh}"
    if len(predictions) > 1:
        mesh = f"Fastest: on {best.mesh}"
    return (
        f"{_in_words(best.size.parameters)} parameters, {_in_words(best.size.tokens)} tokens in the batch.\n"
        f"{mesh}, {_NOUNS[mode]} takes at least {duration(best.seconds)}: "
        f"at most {_in_words(best.tokens_per_second)} tokens/s in total, and an MFU of at most {share(best.mfu)}."
    )


def _row(prediction: Prediction) -> list[str]:
    devices = prediction.mesh.processes
    return [
        str(prediction.mesh),
        str(devices),
        si(prediction.tokens_per_device),
        si(prediction.state_bytes, "B"),
        duration(prediction.seconds),
        duration(prediction.compute_seconds),
        duration(prediction.tp_seconds),
        duration(prediction.dp_seconds),
        duration(prediction.not_hidden_seconds),
        share(prediction.mfu),
        si(prediction.tokens_per_second),
        si(prediction.tokens_per_second / devices),
    ]
