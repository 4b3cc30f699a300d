"""The parts of the trainer: options, schedule, logs, plot, progress, processes, signals."""
