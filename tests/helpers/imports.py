"""What a file imports."""

import ast


def imports_of(path):
    """Return the names of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(imported.name for imported in node.names)
    return found


def neighbors_of(path):
    """Return which files of its own folder a file imports, directly or indirectly."""
    found = set()
    for module in imports_of(path):
        neighbor = path.with_name(f"{module}.py")
        if neighbor.exists():
            found.add(module)
            found.update(neighbors_of(neighbor))
    return found
