"""Measures training on several GPUs, by this package and by torch alone, and models a step's time on more GPUs."""
