"""Measures training on several GPUs beside torch's own engines, and a model of what it costs on more."""
