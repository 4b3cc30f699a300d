"""Models of synchronization between warps, thread blocks and clusters, for tests/ops/test_protocols.py."""
