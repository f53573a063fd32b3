"""What the programs share: command line, sizes and costs, timing, machine, memory, kernels, tables, progress, plots."""
