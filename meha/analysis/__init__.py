"""Theory and diagnostics of problems and points."""
