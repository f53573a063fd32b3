"""What several scripts share: sizes, timing in turns, the machine's name, and tables."""
