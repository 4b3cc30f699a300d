"""Models of how warps, blocks and clusters wait for each other, explored by tests/test_protocols.py."""
