"""Reads an error: which argument does it blame?"""

import re

# A row above a mark, or a line without a table, or jaxtyping's own text.
BLAME = re.compile(
    r"^ *(return value|\w+)(?:\[\d+\])*(?: .*\n *\^  | must be )"
    r"|parameter '(\w+)'|the (return value) of",
    re.MULTILINE,
)


def blamed(error):
    """Return the name of the argument, or "return value"; None for another error."""
    found = BLAME.search(str(error))
    return found and next(filter(None, found.groups()))
