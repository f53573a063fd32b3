"""What each layer guarantees: one page of tests per layer, which `tinyblock verify` and pytest run."""
