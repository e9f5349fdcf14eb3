"""What several tests share: values of a given structure, and a function that can be differentiated once."""

from math import prod

import numpy as np
import torch


def size(shapes):
    if isinstance(shapes, tuple):
        return prod(shapes)
    return sum(size(item) for item in (shapes.values() if isinstance(shapes, dict) else shapes))


def fill(shapes, vector, dtype=torch.float64):
    """A value of that structure with the numbers of ``vector``, in order; None for no structure."""
    rest = list(vector)

    def build(item):
        if isinstance(item, tuple):
            return torch.tensor([rest.pop(0) for _ in range(prod(item))], dtype=dtype).reshape(item)
        return {k: build(v) for k, v in item.items()} if isinstance(item, dict) else [build(v) for v in item]

    return None if shapes is None else build(shapes)


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in (value.values() if isinstance(value, dict) else value) for leaf in leaves(item)]


def flat(value):
    return np.concatenate([leaf.detach().double().numpy().reshape(-1) for leaf in leaves(value)])


class OnlyOnce(torch.autograd.Function):
    """y -> y^2 / 2, with a backward pass that refuses to be differentiated."""

    @staticmethod
    def forward(context, y):
        context.save_for_backward(y)
        return (y.square() / 2).sum()

    @staticmethod
    def backward(context, grad):
        if torch.is_grad_enabled():  # only with create_graph=True, the first half of a double backward
            raise RuntimeError("double backward")
        (y,) = context.saved_tensors
        return grad * y
