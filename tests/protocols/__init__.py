"""Models of synchronisation between warps, thread blocks and clusters, explored by tests/ops/test_protocols.py."""
