"""The parts of the contract that need CUDA; all else of it is tried on every machine, by tinyblock/contract."""

import pytest

import tinyblock
from tinyblock.contract.harness import PROPERTIES

pytestmark = pytest.mark.cuda
LAYERS = {module.__name__.rpartition(".")[2]: module for module in tinyblock.LAYERS}
ON_CUDA = {f"{promised.layer}: {promised.name}": promised for promised in PROPERTIES if "CUDA" in promised.name}


@pytest.mark.parametrize("promised", ON_CUDA)
def test_contract(promised, device):
    if device.type != "cuda":
        pytest.skip("needs a GPU: the same comparison on a CPU is part of the contract")
    ON_CUDA[promised].run(LAYERS)
