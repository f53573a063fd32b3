"""parallelize: four processes against one, and what it refuses."""

import multiprocessing
from pathlib import Path

import pytest
from parallelize import cases
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """Run all cases in one launch of four processes; return the names of those that passed, and what ended the rest."""
    folder, error = Path(tmp_path_factory.mktemp("processes")), ""
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint"])  # imported once
    try:
        start_processes(cases.run_cases, (folder,), cases.PROCESSES, start_method="forkserver")
    except (ProcessRaisedException, ProcessExitedException) as failure:
        error = str(failure)
    names = folder / "passed"
    return names.read_text().splitlines() if names.exists() else [], error


@pytest.mark.parametrize("name", cases.CASES)
def test_processes_agree_that(name: str, passed: tuple[list[str], str]) -> None:
    names, error = passed
    assert name in names, error
