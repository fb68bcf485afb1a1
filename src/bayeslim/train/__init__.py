"""Training: the fit loop, its loaders, schedules, checkpoints, seeds and progress bar."""
