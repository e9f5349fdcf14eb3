"""The matrix of examples of a loss, and its targets: checks, storage, products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["by_columns", "check_data", "check_targets", "gram", "shown", "some", "stored"]

LARGE = 1 << 14
"""Number of entries from which the memory layout of the data matters for speed."""


def stored(A: Tensor) -> Tensor:
    """The numbers that A stores in memory."""
    return A.values() if A.layout == torch.sparse_csr else A


def by_columns(A: Tensor) -> Tensor:
    """A, with its columns contiguous if it is large, dense, on a CPU and has more rows than columns."""
    suits = A.layout == torch.strided and A.device.type == "cpu" and A.numel() >= LARGE and A.shape[0] > A.shape[1]
    return A.t().contiguous().t() if suits else A


def gram(A: Tensor) -> Tensor:
    """A'A in double precision."""
    A = A.double()
    product = A.t() @ A
    return product if product.layout == torch.strided else product.to_dense()


def check_data(A: Tensor) -> None:
    """Refuse what cannot be the data of a loss."""
    if not isinstance(A, Tensor):
        raise TypeError(f"A: must be a tensor, got {type(A).__name__}; wrap arrays with torch.as_tensor.")
    if A.layout not in (torch.strided, torch.sparse_csr):
        raise ValueError(f"A: must be dense or sparse_csr, got the layout {A.layout}; convert it with .to_sparse_csr().")
    if A.ndim != 2 or not A.shape[0] or not A.shape[1] or A.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"A: must be a matrix of float32 or float64 with an example in each row, got {shown(A)}; reshape or convert it."
        )
    if A.requires_grad:
        raise ValueError("A: requires a gradient, but the data of a loss are constants; pass A.detach().")
    if not bool(stored(A).isfinite().all()):
        raise ValueError("A: contains NaN or infinite numbers; remove or impute them.")


def check_targets(name: str, targets: Tensor, A: Tensor, dimensions: tuple[int, ...]) -> None:
    """Refuse targets that do not fit the data."""
    if not isinstance(targets, Tensor):
        raise TypeError(f"{name}: must be a tensor, got {type(targets).__name__}; wrap arrays with torch.as_tensor.")
    if targets.ndim not in dimensions or len(targets) != len(A):
        raise ValueError(f"{name}: is {shown(targets)}, but A has {len(A)} rows; pass one entry for each.")
    if targets.device != A.device:
        raise ValueError(f"{name}: is on {targets.device}, but A is on {A.device}; move one of them.")
    if targets.requires_grad:
        raise ValueError(f"{name}: requires a gradient, but the data of a loss are constants; pass {name}.detach().")


def shown(tensor: Tensor) -> str:
    """The shape and dtype of a tensor."""
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def some(numbers: list[Any]) -> str:
    """The first few of some numbers, in words."""
    return ", ".join(f"{number:g}" for number in numbers[:5]) + (", ..." if len(numbers) > 5 else "")
