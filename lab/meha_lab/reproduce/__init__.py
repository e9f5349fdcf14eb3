"""The experiments of the paper, measured and written up as a report."""
