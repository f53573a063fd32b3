"""Edit a file as a user does."""


def replace(path, right, wrong):
    """Replace a part of a file, which must be there."""
    text = path.read_text()
    assert right in text, f"{path.name} must have {right!r}: {text}"
    path.write_text(text.replace(right, wrong))
