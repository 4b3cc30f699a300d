"""Seeded fuzzers, run by ``make fuzz``: ``fuzz.ops`` calls operators, ``fuzz.files`` reads damaged files."""
