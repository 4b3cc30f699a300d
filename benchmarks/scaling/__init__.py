"""Measures training on several GPUs, beside torch's own engines, and models the time of a step on more GPUs."""
