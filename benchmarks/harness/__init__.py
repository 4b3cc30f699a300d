"""Measures, checks and shows the cases that the ops' files define."""
