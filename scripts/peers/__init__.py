"""Compare tinyblock with other projects: their layers with the weights of a Block, their speed and their errors."""
