"""List the decoder layers of the installed transformers that have no row in docs/models.md.

    pip install transformers
    python scripts/models_without_row.py

Each line has the name of a model in transformers, and the classes of its decoder layers.
"""

import re
from importlib.util import find_spec
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def decoder_layers(folder: Path) -> dict[str, list[str]]:
    """Return the decoder layers in a folder `models` of transformers, for each model."""
    found = {}
    for path in sorted(folder.glob("*/modeling_*.py")):
        classes = re.findall(
            r"^class (\w+DecoderLayer)\b", path.read_text(), re.MULTILINE
        )
        if classes:
            found[path.parent.name] = classes
    return found


def rows(page: str) -> set[str]:
    """Return the names that the second column of a table on the page contains."""
    return set(re.findall(r"^\|[^|]+\| `(\w+)` \|", page, re.MULTILINE))


def main() -> None:
    package = find_spec("transformers")
    if package is None or package.origin is None:
        raise SystemExit("transformers must be installed: pip install transformers")
    found = decoder_layers(Path(package.origin).parent / "models")
    have_row = rows(PAGE.read_text())
    for model, classes in found.items():
        if model not in have_row:
            print(f"{model}: {', '.join(classes)}")
    print(f"{len(found.keys() & have_row)} of {len(found)} models have a row")


if __name__ == "__main__":
    main()
