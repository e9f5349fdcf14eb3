"""Solve the lower level at one x, and learn its shape."""
