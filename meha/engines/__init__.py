"""The engines of the default: methods that a user can also name."""
