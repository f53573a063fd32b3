"""The one way in which the command and the scripts refuse what was typed."""

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Refuse in one line, without the usage, and exit with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")
