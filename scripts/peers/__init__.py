"""The layers of other projects, with the weights of a Block."""
