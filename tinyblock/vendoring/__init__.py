"""The command `tinyblock`: copy layers into a project, keep them up to date, and verify them."""


class CommandError(Exception):
    """A command failed; the message is one line, and no file has changed."""
