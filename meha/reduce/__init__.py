"""Rewrite a problem into an easier one: kinks to epigraphs, sets to constraints, both levels to a nonlinear program."""
