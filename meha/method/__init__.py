"""What a method is: hyper-parameters, state, run, status."""
