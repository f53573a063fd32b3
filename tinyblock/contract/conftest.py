"""Collect the pages of this folder in any project, and touch no other test of it.

The folder has no __init__.py: the pages become modules of a package with a name of its
own. So a project may have several contracts, and a contract anywhere.
"""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent

package = ModuleType(re.sub(r"\W", "_", f"contract_{FOLDER}"))
package.__path__ = [str(FOLDER)]
sys.modules[package.__name__] = package
if str(FOLDER) in sys.path:  # pytest has put it there
    sys.path.remove(str(FOLDER))


def part(name):
    """Import a file of this folder."""
    return importlib.import_module(f"{package.__name__}.{name}")


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")
    config.addinivalue_line("markers", "numbers: holds for every correct layer")
    give_back_the_name_conftest(config)


def give_back_the_name_conftest(config):
    """Let `import conftest` find the project's own, if pytest has given this one its name."""
    this = sys.modules.get("conftest")
    if getattr(this, "__file__", None) != __file__:
        return
    del sys.modules["conftest"]
    for _, plugin in config.pluginmanager.list_name_plugin():
        is_of_a_contract = hasattr(plugin, "give_back_the_name_conftest")
        if getattr(plugin, "__name__", "") == "conftest" and not is_of_a_contract:
            sys.modules["conftest"] = plugin


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """Collect a page, and nothing else here, such as doctests."""
    found = yield
    if not found or not file_path.name.startswith("test_"):
        return []
    page = pytest.Module.from_parent(parent, path=file_path)
    page.obj = part(file_path.stem)
    return [page]


def pytest_runtest_setup(item):
    """Leave out a page without a layer, and tinyblock's promises if it is not a copy."""
    layer = item.path.stem.removeprefix("test_")
    target = part("target")
    if not target.exists(layer):
        pytest.skip(f"there is no {layer}.py in {target.folder()}")
    if item.get_closest_marker("numbers") or item.config.option.markexpr:
        return
    if target.is_foreign(layer):
        pytest.skip(f"{layer}.py is not a copy of tinyblock's")


def pytest_generate_tests(metafunc):
    """Test on the CPU, and on a GPU if there is one."""
    if "device" in metafunc.fixturenames:
        import torch  # not above: a project's tests may run without it

        on_gpu = pytest.param("cuda", marks=pytest.mark.cuda)
        devices = ["cpu", on_gpu] if torch.cuda.is_available() else ["cpu"]
        metafunc.parametrize("device", devices)
