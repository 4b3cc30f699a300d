"""Seeded fuzzers, run by ``make fuzz``: ``fuzz.ops`` (operators), ``fuzz.steps`` (training), ``fuzz.files``."""
