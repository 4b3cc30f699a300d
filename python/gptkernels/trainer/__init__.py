"""The commands of `gptkernels`: training, evaluation and generation, and the command line."""
