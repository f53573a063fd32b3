"""Types of the scripts' options."""


class Refused(ValueError):
    """Something that a script does not take. The message is all that a user must know."""


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value
