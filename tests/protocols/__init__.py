"""Models of how warps, blocks and clusters wait for each other, explored by tests/ops/test_protocols.py."""
