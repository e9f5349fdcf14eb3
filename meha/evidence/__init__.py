"""Evidence for an answer: other starts, other basins, and the rule for \"converged\"."""
