"""Profile blocks by profile_block.py as a user would, and judge its figures; ceilings are measured once more, here."""

import gzip
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from profiling.files import atomic
from profiling.measure import BACKENDS
from torch.utils.benchmark import Timer

from .options import parse
from .rows import Rows

SCRIPT = Path(__file__).parents[1] / "profile_block.py"
TINY = ("--seq-len", "16", "--d-model", "64", "--num-heads", "4", "--rounds", "2")
BATCH = ("--batch-size", "4", "--seq-len", "2048", "--rounds", "7")
PRESETS = ("llama-3.1-8b", "llama-3.2-1b")
LIMIT = 90  # seconds of one profile


@dataclass(frozen=True)
class Run:
    """A call of profile_block.py; its report must have kernels on CUDA, and those of `files` must be written."""

    name: str
    options: tuple[str, ...]
    files: tuple[str, ...] = ()


def runs(device: str, quick: bool) -> list[Run]:
    """Return the runs, the most wanted first. A CPU compiles for too long, and has none of what is for CUDA."""
    half, size = ("--dtype", "bfloat16"), TINY if quick else BATCH
    files = {"--plot": "profile.png"} if importlib.util.find_spec("matplotlib") else {}
    files |= {"--trace": "trace.json"} | ({"--memory-snapshot": "memory.pickle"} if device == "cuda" else {})
    recorded = tuple(word for pair in files.items() for word in pair)
    blocks = []
    for name in PRESETS:
        step = ("--preset", name, *half, *size, "--mode", "step")
        one_token = (*step, "--mode", "forward", "--batch-size", "1", "--seq-len", "1")
        for how, options in (("", ()), (", compiled", ("--compile",))):
            blocks += [
                Run(f"{name} step{how}", (*step, *options)),
                Run(f"{name} one token{how}", (*one_token, *options)),
            ]
    blocks[0] = replace(blocks[0], options=(*blocks[0].options, *recorded), files=tuple(files.values()))
    small = (*half, *TINY) if quick else (*half, "--rounds", "3")
    others = [Run("--nvtx", (*small, "--nvtx"))]
    others += [Run(f"--attention-backend {name}", (*small, "--attention-backend", name)) for name in BACKENDS]
    if device == "cpu":
        return blocks[:1]
    if quick:
        return [blocks[0], blocks[2], *others[:2]]
    return [Run("defaults", ()), *blocks[:4], *others, *blocks[4:]]


def profile(run: Run, device: str, folder: Path, limit: float) -> tuple[dict[str, Any] | None, str]:
    """Return the report, and what went wrong."""
    command = [sys.executable, str(SCRIPT), "--device", device, *run.options, "--json", "report.json"]
    print(f"\n$ {' '.join(command)}", flush=True)
    (folder / "report.json").unlink(missing_ok=True)
    try:
        done = subprocess.run(command, cwd=folder, stderr=subprocess.PIPE, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None, f"cut off after {limit:.0f} s"
    print(done.stderr, flush=True)
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    absent = [name for name in run.files if not (folder / name).is_file()]
    return json.loads((folder / "report.json").read_text()), f"not written: {', '.join(absent)}" if absent else ""


def judge(report: dict[str, Any], device: str) -> tuple[str, list[str]]:
    """Return the figures of a report, and what is wrong with them."""
    point, settings = report["points"][0], report["settings"]
    if point["status"] != "ok":
        return "", [f"{point['status']}: {point['error']}"]
    mode, wrong = settings["mode"], []
    whole, kernels, compiled = point["whole"][mode], point["kernels"], point["compile"]
    parts = point["sum_of_parts"]["train" if mode == "step" else mode]["of_whole"]["median"]
    figures = [f"{whole['seconds']['median'] * 1e3:.3g} ms", f"parts {parts:.2f} of the whole"]
    figures += [f"MFU {kind} {of['measured']:.0%} of measured" for kind, of in point["mfu"].items()]
    # What is compiled as a whole is fused over its parts: their sum is more.
    if not compiled and not 0.9 <= parts <= 1.1:
        wrong.append("the sum of the parts is more than 10% off")
    if compiled and compiled["graph_breaks"]:
        wrong.append(f"{compiled['graph_breaks']} graph breaks")
    if kernels:
        figures.append(f"{kernels['count']} kernels, busy {kernels['busy_fraction']:.0%}")
    elif device == "cuda" and not report["environment"]["command"].count("--nvtx"):
        wrong.append("no kernel was counted")
    return ", ".join(figures), [*wrong, *point["notes"]]


def independent_ceilings(device: str, dtype: torch.dtype, quick: bool) -> dict[str, float]:
    """Measure FLOP/s of a large product, and bytes/s of a large copy, read and written, by torch's own benchmark."""
    side, count = (256, 2**20) if quick else (8192, 2**30)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.randn(count // dtype.itemsize, device=device).to(dtype)
    target = torch.empty_like(source)

    def seconds(statement: str) -> float:
        timer = Timer(statement, globals={"a": a, "b": b, "source": source, "target": target})
        return timer.blocked_autorange(min_run_time=0.5).median

    return {
        "flops_per_second": 2 * side**3 / seconds("a @ b"),
        "bytes_per_second": 2 * source.nbytes / seconds("target.copy_(source)"),
    }


def judge_ceilings(report: dict[str, Any], rows: Rows, device: str, quick: bool) -> None:
    """Compare the ceilings of a report with those that are measured here, and with the datasheet."""
    dtype = report["settings"]["dtype"]
    for name, rate in independent_ceilings(device, getattr(torch, dtype), quick).items():
        theirs, peak = report["ceilings"][name]["median"], (report["ceilings"]["datasheet"] or {}).get(name)
        detail = f"{theirs:.3g}, measured here {rate:.3g}: {theirs / rate:.3f} of it"
        detail += f"; {theirs / peak:.2f} of the datasheet's" if peak else "; no datasheet"
        good = abs(theirs / rate - 1) <= 0.05 and (peak is None or theirs <= peak)
        rows.add(f"{name}, {dtype}", "not judged" if quick else "ok" if good else "failed", detail)


def main() -> int:
    options = parse(__doc__)
    rows, start = Rows(options.out / "results.jsonl", "profile"), time.monotonic()
    reports: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for run in runs(options.device, options.quick):
            began = time.monotonic()
            left = options.seconds - (began - start)
            if left < 5:
                rows.add(run.name, "missing", "no time was left")
                continue
            report, problem = profile(run, options.device, folder, min(LIMIT, left))
            seconds = time.monotonic() - began
            if report is None:
                rows.add(run.name, "failed", problem, seconds)
                continue
            figures, wrong = judge(report, options.device)
            wrong = [*wrong, problem] if problem else wrong
            status = "not judged" if options.quick else "failed" if wrong else "ok"
            rows.add(run.name, status, "; ".join([*wrong, figures]), seconds)
            dtype = report["settings"]["dtype"]
            if all(it["settings"]["dtype"] != dtype for it in reports.values()):
                judge_ceilings(report, rows, options.device, options.quick)
            reports[run.name] = report
            with atomic(options.out / "profiles.json") as path:
                path.write_text(json.dumps(reports))
        for name in ("profile.png", "trace.json"):
            if (folder / name).exists():
                content = (folder / name).read_bytes()
                made = options.out / name
                if name.endswith(".json"):
                    made, content = made.with_name(f"{name}.gz"), gzip.compress(content)
                made.write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
