"""Variables as tensors: structures, gradients, flat vectors, several processes, torch's private names."""
