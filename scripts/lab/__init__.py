"""What several scripts share: sizes, timing alternately, the machine's name, and tables."""
