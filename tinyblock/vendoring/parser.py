"""The parser of the command and of the scripts."""

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Report wrong arguments in one line, without the usage, and exit with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")
