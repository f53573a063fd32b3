"""Types of the scripts' options."""


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value
