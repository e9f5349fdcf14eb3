"""Algorithms on vectors and arrays that know nothing of problems."""
