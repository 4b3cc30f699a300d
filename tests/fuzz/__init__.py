"""Fuzzers of operators (``fuzz.ops``), training steps (``fuzz.steps``) and files (``fuzz.files``): ``make fuzz``."""
