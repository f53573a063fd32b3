"""A training run from its start to its results: losses, checkpoints, a picture and a sample of text."""

import json
import math
import os
import signal
import time
from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import IO

import torch
from lab.files import require_writable
from lab.progress import Progress
from lab.records import to_plain
from torch import Tensor

from . import checkpoints
from .checkpoints import Checkpoint
from .text import Text, even_windows, trigram_loss
from .trainer import Settings, StepRecord, Trainer

VALIDATION_BATCHES = 8
SAMPLE = 200  # bytes that the model writes at the end
PROMPT = 64  # bytes of the validation text before them
UNTIMED = 5  # first steps, in which torch compiles and allocates
REPORTS = 10  # lines on the progress of a run


@dataclass(frozen=True)
class Run:
    """What to train, and where to write.

    settings: of the model and its training.
    text: what it reads.
    source: where the text comes from, for the picture.
    device: where it trains.
    compile: whether torch.compile compiles the model.
    folder: of the checkpoints; None for none.
    every: number of steps between checkpoints; None for one at the end only.
    losses: the file that gets a line of JSON for each step, or None.
    picture: the file of the picture, or None.
    command: the command line that resumes the run.
    """

    settings: Settings
    text: Text
    source: str
    device: torch.device
    compile: bool
    folder: Path | None
    every: int | None
    losses: Path | None
    picture: Path | None
    command: str

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint follows this step."""
        if step == self.settings.steps:
            return True
        return self.every is not None and step % self.every == 0

    def reports_after(self, step: int) -> bool:
        """Return whether a validation and a line on the progress follow this step."""
        steps = self.settings.steps
        return step == steps or step % max(1, steps // REPORTS) == 0


def open_folder(folder: Path, resume: bool) -> Checkpoint | None:
    """Make a folder for checkpoints, and return the last one that it has.

    Raises:
        ValueError: there is one without `resume`, or no folder with it, or the folder or the checkpoint is unusable.
    """
    if resume and not folder.is_dir():
        raise ValueError(
            f"--checkpoint must be a folder with --resume, but there is no folder {folder}: remove --resume to begin"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_writable(folder / "any")
        saved = checkpoints.saved_in(folder)
        if not saved:
            return None
        if not resume:
            raise ValueError(
                f"{folder} has checkpoints: add --resume, or use another folder"
            )
        return checkpoints.read(saved[-1])
    except OSError as error:
        raise ValueError(f"--checkpoint {error.filename}: {error.strerror}") from None


def require_steps(checkpoint: Checkpoint, steps: int) -> None:
    """Raise a ValueError if a checkpoint is of a run with more steps, or with a longer warm-up, than this number."""
    least = {
        "steps": len(checkpoint.history),
        "warm-up steps": checkpoint.settings.warmup,
    }
    for name, number in least.items():
        if steps < number:
            raise ValueError(
                f"--steps must be at least {number}, the {name} of {checkpoint.path}, got {steps}: "
                "raise it, or train in another folder"
            )


def require_same_run(checkpoint: Checkpoint, settings: Settings, text: Text) -> None:
    """Raise a ValueError unless a run with these settings and this text continues that of the checkpoint."""
    for field in fields(Settings):
        if field.name == "steps":
            # A resumed run may have another number of steps: see require_steps.
            continue
        expected = getattr(checkpoint.settings, field.name)
        got = getattr(settings, field.name)
        if expected != got:
            option = "--" + field.name.replace("_", "-")
            raise ValueError(
                f"{checkpoint.path} is from another run: its {option} is {expected}, but here it is {got}: "
                "use its value, or another folder"
            )
    if checkpoint.text_sha256 != text.sha256:
        raise ValueError(
            f"{checkpoint.path} is from another run: its text is another one "
            "(was an output written to a folder of --data?)"
        )


def train(run: Run, checkpoint: Checkpoint | None) -> int:
    """Train from the checkpoint, or from the start, to the last step or to a signal, and return the exit code.

    Raises:
        DamagedCheckpoint: the weights or the optimizer's state do not fit the model.
        Diverged: the loss or the gradient is not finite.
    """
    windows = _validation_windows(run)
    trigram = trigram_loss(run.text.training, windows)
    _print_text(run.text, trigram)
    trainer = _build(run)
    parameters = sum(map(torch.numel, trainer.model.parameters()))
    print(f"model: {parameters:,} parameters on {run.device}", flush=True)
    if checkpoint is not None:
        checkpoints.restore(trainer, checkpoint)
        _print_resumed(checkpoint, run.settings.steps)
    saved = None
    try:
        signal_number = _take_steps(run, trainer, windows)
        # A run that no signal stops has its checkpoint: _take_steps saves one after the last step.
        if signal_number and run.folder is not None:
            saved = checkpoints.path_of(run.folder, trainer.step)
            # If --every fell on the last step that was taken, it is there already.
            if not saved.exists():
                checkpoints.save(run.folder, trainer, run.text.sha256)
    finally:
        if run.picture is not None and trainer.history:
            _draw(run, trainer, parameters, trigram)
    if signal_number:
        print(_about_stop(run, trainer.step, signal_number, saved))
        return 128 + signal_number
    _print_sample(trainer, run.text)
    return 0


def _validation_windows(run: Run) -> Tensor:
    settings = run.settings
    count = VALIDATION_BATCHES * settings.batch_size
    return even_windows(run.text.validation, count, settings.seq_len + 1)


def _print_text(text: Text, trigram: float) -> None:
    """Print what the model reads, and the loss of a trigram model on it."""
    print(
        f"text: {text.files} files, {len(text.training):,} bytes for training "
        f"and {len(text.validation):,} for validation, SHA-256 {text.sha256}"
    )
    print(f"trigram model: validation {_in_both_units(trigram)}")


def _print_resumed(checkpoint: Checkpoint, steps: int) -> None:
    """Print how many steps are done, and whether the schedule of the learning rate changes."""
    print(f"{len(checkpoint.history)} of {steps} steps are done")
    planned = checkpoint.settings.steps
    if steps != planned:
        print(
            f"the schedule of the learning rate now ends at step {steps} instead of {planned}"
        )


def _build(run: Run) -> Trainer:
    if run.device.type == "cuda":
        # So that resumed runs have the same losses. With warn_only=True, gradients differ.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(run.settings.seed)
    model = run.settings.build().to(run.device)
    if run.compile:
        model.compile()
    return Trainer(model, run.text.training, run.settings)


def _take_steps(run: Run, trainer: Trainer, windows: Tensor) -> int:
    """Train to the last step, or to a signal; return the number of that signal, or 0."""
    steps = run.settings.steps
    speed = Speed(run.settings)
    path = run.losses or Path(os.devnull)
    with StopSignals() as signals, Progress() as progress, path.open("w") as lines:
        for record in trainer.history:
            _write_line(lines, record)
        progress.start("training", steps - trainer.step)
        while trainer.step < steps and not signals.received:
            with speed:
                record = trainer.advance()
            record.bytes_per_second = speed.bytes_per_second()
            if run.reports_after(trainer.step):
                record.validation = float(trainer.validate(windows).mean())
                progress.print(_report(record, steps))
            progress.advance(_report(record, steps))
            _write_line(lines, record)
            if run.folder is not None and run.saves_after(trainer.step):
                checkpoints.save(run.folder, trainer, run.text.sha256)
    return signals.received


def _write_line(file: IO[str], record: StepRecord) -> None:
    print(json.dumps(to_plain(record)), file=file, flush=True)


class Speed:
    """Time the steps, without validation and checkpoints, in a `with` statement around each."""

    def __init__(self, settings: Settings) -> None:
        self._bytes = settings.batch_size * settings.seq_len
        self._untimed = UNTIMED
        self._seconds = deque[float](maxlen=100)

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self._untimed > 0:
            self._untimed -= 1
        else:
            self._seconds.append(time.perf_counter() - self._start)

    def bytes_per_second(self) -> int | None:
        """Return the speed of the last steps; None before any was timed."""
        if not self._seconds:
            return None
        return round(self._bytes / mean(self._seconds))


class StopSignals:
    """Let Ctrl-C and SIGTERM end the run after the current step; a second signal has its usual effect."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = 0
        self._before = {number: signal.getsignal(number) for number in self.NUMBERS}

    def __enter__(self) -> "StopSignals":
        for number, handler in self._before.items():
            # nohup has SIGINT ignored, and so it stays.
            if handler != signal.SIG_IGN:
                signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._before[signal.Signals(number)])


def _report(record: StepRecord, steps: int) -> str:
    line = f"step {record.step}/{steps}, loss {_in_both_units(record.loss)}"
    if record.validation is not None:
        line += f", validation {_in_both_units(record.validation)}"
    if record.bytes_per_second is not None:
        line += f", {record.bytes_per_second:,} bytes/s"
    return line


def _in_both_units(nats: float) -> str:
    return f"{nats:.3f} nats/byte ({nats / math.log(2):.3f} bits/byte)"


def _about_stop(run: Run, step: int, signal_number: int, saved: Path | None) -> str:
    """Return which signal stopped the run, what was written, and how to resume it."""
    stop = f"stopped by {signal.Signals(signal_number).name} after step {step}"
    if saved is not None:
        return f"{stop}; saved {saved}. To resume:\n  {run.command}"
    if step > 0:
        outputs = [str(path) for path in (run.losses, run.picture) if path is not None]
        if outputs:
            stop += f"; wrote {' and '.join(outputs)}"
    return f"{stop}; without --checkpoint DIR, no checkpoint was saved"


def _draw(run: Run, trainer: Trainer, parameters: int, trigram: float) -> None:
    from .plot import plot_losses, sizes_of

    assert run.picture is not None
    title = f"Byte-level language model trained on {run.source}"
    sizes = sizes_of(run.settings, trainer.step)
    origin = f"{parameters:,} parameters, {sizes}"
    plot_losses(run.picture, trainer.history, trigram, title, origin)


def _print_sample(trainer: Trainer, text: Text) -> None:
    """Print what the model writes after the start of the validation text."""
    prompt = bytes(text.validation[:PROMPT].tolist())
    # Otherwise each length would be compiled.
    with torch.compiler.set_stance("force_eager"):
        sample = trainer.continue_text(prompt, SAMPLE)
    print(f"prompt (the start of the validation text):\n{_printable(prompt)}")
    print(f"continuation by the model:\n{_printable(sample)}", flush=True)


def _printable(data: bytes) -> str:
    """Decode UTF-8, with a replacement for what is none or would move the cursor."""
    characters = []
    for character in data.decode("utf-8", "replace"):
        is_shown = character.isprintable() or character == "\n"
        characters.append(character if is_shown else "\ufffd")
    return "".join(characters)
