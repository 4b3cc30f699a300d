"""The command line `gptkernels`, and its commands for training, evaluation and generation."""
