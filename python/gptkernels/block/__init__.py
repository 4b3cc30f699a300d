"""A GPT-2 block as one node of the autograd graph."""
