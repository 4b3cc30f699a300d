"""The parts of the trainer: options, data, schedule, files of a run, logs, progress, processes, signals."""
