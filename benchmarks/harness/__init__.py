"""Measuring, checking and showing the cases of the ops' files."""
