"""The command `tinyblock`: copy layers into a project, and keep them known, up to date and right."""


class Refusal(Exception):
    """What was asked for cannot be done; the message is one line, and nothing on the disk has changed."""
