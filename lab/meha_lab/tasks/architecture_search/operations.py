"""The eight operations of DARTS, with batched evaluation of several operations of a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, pad, relu, silu

__all__ = [
    "OPERATIONS",
    "SKIP",
    "ZERO",
    "FactorisedReduction",
    "Factory",
    "Pool",
    "Projection",
    "SeparableConv",
    "Skip",
    "Style",
    "ZeroOperation",
]


EPSILON = 1e-5
"""Added to variances in batch normalisation, as in torch."""

SKIP, ZERO = "skip", "none"
"""The names of the operations without parameters that derived cells treat in a special way."""


@dataclass(frozen=True)
class Style:
    """Options that all operations of a network share.

    Attributes:
        activation: ReLU, or Swish: x sigmoid(x).
        final: the form of the final network, whose normalisations have trained scales and running statistics, and whose pools
            have none. In a search, every normalisation uses the statistics of its batch.
    """

    activation: Literal["relu", "swish"] = "relu"
    final: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ("relu", "swish"):
            raise ValueError(f"activation: must be 'relu' or 'swish', got {self.activation!r}.")

    def activate(self, x: Tensor) -> Tensor:
        """Apply the activation."""
        return relu(x) if self.activation == "relu" else silu(x)

    def norm(self, channels: int) -> nn.BatchNorm2d:
        """Make a batch normalisation."""
        return nn.BatchNorm2d(channels, EPSILON, affine=self.final, track_running_stats=self.final)


Factory = Callable[[int, int, Style], nn.Module]
"""A function that returns an operation, given the number of channels, the stride and the style.

An operation maps images (N, channels, H, W) to (N, channels, H / stride, W / stride). Its class may have a static method
``together(operations, x, weights)``: the images of several operations of this kind at the same x, each multiplied by its
weight, with their channels one after the other. Without it, they are computed one by one.
"""


class ZeroOperation(nn.Module):
    """The operation "none", which returns zeros."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[:, :, :: self.stride, :: self.stride])


class Pool(nn.Module):
    """Pooling over 3 x 3 pixels; in a search, normalisation follows. Averages leave out the padding."""

    def __init__(self, kind: Literal["max", "average"], channels: int, stride: int, style: Style) -> None:
        super().__init__()
        self.pool = (
            nn.MaxPool2d(3, stride, padding=1) if kind == "max" else nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
        )
        self.norm = None if style.final else style.norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(x)
        return pooled if self.norm is None else self.norm(pooled)

    @staticmethod
    def together(operations: Sequence[Pool], x: Tensor, weights: Tensor) -> Tensor:
        """Evaluate one pool for all: pools have no parameters in a search."""
        return _repeat(operations[0](x), weights)


class Skip(nn.Module):
    """The identity operation."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def together(operations: Sequence[Skip], x: Tensor, weights: Tensor) -> Tensor:
        return _repeat(x, weights)


class Projection(nn.Module):
    """Activation, 1 x 1 convolution and normalisation, which change the number of channels."""

    def __init__(self, inputs: int, outputs: int, style: Style) -> None:
        super().__init__()
        self.style = style
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm = style.norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.norm(self.conv(self.style.activate(x)))
        return projected


class FactorisedReduction(nn.Module):
    """Halve height and width by two 1 x 1 convolutions with stride 2, one shifted by a pixel, and normalisation.

    Both are computed as one 2 x 2 convolution with zeros in its kernel.
    """

    def __init__(self, inputs: int, outputs: int, style: Style) -> None:
        super().__init__()
        self.style = style
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.norm = style.norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        halved: Tensor = self.norm(conv2d(self.style.activate(x), self._kernel(), stride=2))
        return halved

    @staticmethod
    def together(operations: Sequence[FactorisedReduction], x: Tensor, weights: Tensor) -> Tensor:
        kernel = torch.cat([operation._kernel() for operation in operations])
        return _weighted_norm(conv2d(operations[0].style.activate(x), kernel, stride=2), weights)

    def _kernel(self) -> Tensor:
        return torch.cat([pad(self.even.weight, (0, 1, 0, 1)), pad(self.odd.weight, (1, 0, 1, 0))])


class SeparableConv(nn.Module):
    """Activation, depthwise and pointwise convolution, normalisation: ``layers`` times, with the stride in the first.

    Nothing lies between depthwise and pointwise convolution, so that both equal one convolution whose kernel is the product of
    theirs. A GPU is many times faster with that one (``fused``), a CPU with the two.
    """

    def __init__(self, channels: int, stride: int, style: Style, *, size: int, dilation: int = 1, layers: int = 1) -> None:
        super().__init__()
        self.style, self.dilation, self.padding = style, dilation, dilation * (size // 2)
        self.strides = [stride, *[1] * (layers - 1)]
        self.depthwise = nn.ModuleList(
            nn.Conv2d(channels, channels, size, s, self.padding, dilation, groups=channels, bias=False) for s in self.strides
        )
        self.pointwise = nn.ModuleList(nn.Conv2d(channels, channels, 1, bias=False) for _ in self.strides)
        self.norms = nn.ModuleList(style.norm(channels) for _ in self.strides)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in enumerate(self.norms):
            x = norm(self._convolve([self], layer, self.style.activate(x)))
        return x

    @staticmethod
    def together(operations: Sequence[SeparableConv], x: Tensor, weights: Tensor) -> Tensor:
        first, layers = operations[0], len(operations[0].norms)
        for layer in range(layers):
            x = first._convolve(operations, layer, first.style.activate(x))
            x = _weighted_norm(x, weights if layer == layers - 1 else torch.ones_like(weights))  # only the output is weighted
        return x

    def _convolve(self, operations: Sequence[SeparableConv], layer: int, x: Tensor, fused: bool | None = None) -> Tensor:
        """Convolve a layer of several operations: in the first layer all have the same x, later each has its own channels."""
        depthwise, pointwise = (
            torch.cat([getattr(each, name)[layer].weight for each in operations])
            if len(operations) > 1
            else getattr(operations[0], name)[layer].weight
            for name in ("depthwise", "pointwise")
        )
        stride, groups = self.strides[layer], 1 if layer == 0 else len(operations)
        fused = x.is_cuda if fused is None else fused
        if fused:
            # depthwise has a kernel for each input channel of each operation: (operations, 1, channels, size, size)
            each = depthwise.unflatten(0, (len(operations), -1)).transpose(1, 2)
            kernel = (pointwise.unflatten(0, (len(operations), -1)) * each).flatten(0, 1)
            return conv2d(x, kernel, None, stride, self.padding, self.dilation, groups)
        if layer == 0 and len(operations) > 1:
            x = _copies(x, len(operations))
        x = conv2d(x, depthwise, None, stride, self.padding, self.dilation, x.shape[1])
        return conv2d(x, pointwise, groups=len(operations))


def _repeat(x: Tensor, weights: Tensor) -> Tensor:
    """Return the images once for each weight, multiplied by it."""
    return _copies(x, len(weights)) * _per_channel(weights, x.shape[1]).to(x.dtype)[:, None, None]


def _copies(x: Tensor, count: int) -> Tensor:
    """Return copies of the images as blocks of channels."""
    return torch.cat([x] * count, dim=1) if count > 1 else x  # unlike repeat, cat keeps the memory format


def _weighted_norm(x: Tensor, weights: Tensor) -> Tensor:
    """Normalise each channel by the statistics of the batch, and multiply each block of channels by its weight."""
    scale = _per_channel(weights, x.shape[1] // len(weights))
    # As the scale of the normalisation, the weights cost no further pass over the images.
    return batch_norm(x, None, None, scale, torch.zeros_like(scale), training=True, eps=EPSILON)


def _per_channel(weights: Tensor, channels: int) -> Tensor:
    """Return each weight repeated for all channels of its block."""
    return weights[:, None].expand(-1, channels).reshape(-1).contiguous()  # batch_norm misreads expanded views


def _skip(channels: int, stride: int, style: Style) -> nn.Module:
    return Skip() if stride == 1 else FactorisedReduction(channels, channels, style)  # an identity cannot halve the image


def _separable(size: int) -> Factory:
    return lambda channels, stride, style: SeparableConv(channels, stride, style, size=size, layers=2)


def _dilated(size: int) -> Factory:
    return lambda channels, stride, style: SeparableConv(channels, stride, style, size=size, dilation=2)


OPERATIONS: Mapping[str, Factory] = {
    ZERO: lambda channels, stride, style: ZeroOperation(stride),
    "max pool 3x3": lambda channels, stride, style: Pool("max", channels, stride, style),
    "average pool 3x3": lambda channels, stride, style: Pool("average", channels, stride, style),
    SKIP: _skip,
    "separable conv 3x3": _separable(3),
    "separable conv 5x5": _separable(5),
    "dilated conv 3x3": _dilated(3),
    "dilated conv 5x5": _dilated(5),
}
"""The operations of DARTS (Liu, Simonyan and Yang 2019), by name. Add your own: ``{**OPERATIONS, "name": factory}``."""
