"""The networks of architecture search written out with plain tensors, for tests to compare with."""

import torch
from torch.nn import functional

ACTIVATIONS = {"relu": lambda x: x.clamp(min=0), "swish": lambda x: x / (1 + torch.exp(-x))}


def normalised(x):
    """Each channel with mean 0 and variance 1 over the batch."""
    centred = x - x.mean(dim=(0, 2, 3), keepdim=True)
    return centred / (centred.square().mean(dim=(0, 2, 3), keepdim=True) + 1e-5).sqrt()


def normed(norm, x):
    """A normalisation as in training, with the scales of the module if it has any."""
    if not norm.affine:
        return normalised(x)
    return normalised(x) * norm.weight[:, None, None] + norm.bias[:, None, None]


def windows(x, stride, value):
    """The 3 x 3 windows around every pixel, or every second one: (N, C, H, W, 3, 3)."""
    return functional.pad(x, (1, 1, 1, 1), value=value).unfold(2, 3, stride).unfold(3, 3, stride)


def reduction(module, x, act):
    """Two strided 1 x 1 convolutions, the second on the pixels right below those of the first."""
    x = ACTIVATIONS[act](x)
    halves = [
        torch.einsum("oi,nihw->nohw", conv.weight[:, :, 0, 0], x[:, :, start::2, start::2])
        for start, conv in enumerate((module.even, module.odd))
    ]
    return normed(module.norm, torch.cat(halves, dim=1))


def projection(module, x, act):
    return normed(module.norm, torch.einsum("oi,nihw->nohw", module.conv.weight[:, :, 0, 0], ACTIVATIONS[act](x)))


def convolutions(module, x, stride, act, size, dilation):
    """Modules of torch one after the other, with the weights of the operation."""
    channels = x.shape[1]
    for i in range(len(module.norms)):
        depthwise = torch.nn.Conv2d(
            channels,
            channels,
            size,
            stride=stride if i == 0 else 1,
            padding={(3, 1): 1, (5, 1): 2, (3, 2): 2, (5, 2): 4}[size, dilation],
            dilation=dilation,
            groups=channels,
            bias=False,
        )
        pointwise = torch.nn.Conv2d(channels, channels, 1, bias=False)
        del depthwise.weight, pointwise.weight
        depthwise.weight, pointwise.weight = module.depthwise[i].weight, module.pointwise[i].weight
        x = normed(module.norms[i], torch.nn.Sequential(depthwise, pointwise)(ACTIVATIONS[act](x)))
    return x


def operation(name, module, x, stride, act="relu", final=False):
    """One of the eight operations of DARTS."""
    if name == "none":
        return torch.zeros_like(x[:, :, ::stride, ::stride])
    if name == "max pool 3x3":
        pooled = windows(x, stride, -torch.inf).amax(dim=(4, 5))
        return pooled if final else normalised(pooled)
    if name == "average pool 3x3":
        pooled = windows(x, stride, 0.0).sum(dim=(4, 5)) / windows(torch.ones_like(x), stride, 0.0).sum(dim=(4, 5))
        return pooled if final else normalised(pooled)
    if name == "skip":
        return x if stride == 1 else reduction(module, x, act)
    kind, size = name.split()[0], int(name[-1])
    return convolutions(module, x, stride, act, size, dilation=2 if kind == "dilated" else 1)


def stem(network, images):
    conv, norm = network.stem
    return normed(norm, functional.conv2d(images, conv.weight, padding=1))


def inputs(network, i, states, halved, act):
    """The two inputs of cell i: the older one is halved if the cell in between has halved its own."""
    first, second = network.before[i]
    older = reduction(first, states[0], act) if halved else projection(first, states[0], act)
    return [older, projection(second, states[1], act)]


def scores(network, features):
    return features.mean(dim=(2, 3)) @ network.linear.weight.T + network.linear.bias


def edge(fan, place, kept, state, stride, weights, act, partial, skip_factor=None):
    """One mixed edge: ``place`` among the edges of a fan, with the operations ``kept`` and their ``weights``."""
    active = state[:, : state.shape[1] // partial]
    mixed = torch.zeros_like(active[:, :, ::stride, ::stride])
    for weight, name in zip(weights, kept, strict=True):
        column = fan.names.index(name)
        module = fan.operations[column][fan.edges[column].index(place)]
        image = operation(name, module, active, stride, act)
        if name == "skip" and skip_factor is not None:
            image = skip_factor[:, None, None, None] * image
        mixed = mixed + weight * image
    if partial == 1:
        return mixed
    others = state[:, state.shape[1] // partial :]
    if stride == 2:
        others = torch.stack([others[:, :, a::2, b::2] for a in (0, 1) for b in (0, 1)]).amax(dim=0)
    joined, size = torch.cat([mixed, others], dim=1), state.shape[1] // partial
    return joined[:, [group * size + i for i in range(size) for group in range(partial)]]


def super_network(network, images, x, kept, *, nodes, cells, act="relu", partial=1, noise=None, rate=0.0):
    """Class scores of a super-network, edge by edge."""
    states, halved = [stem(network, images)] * 2, False
    for i in range(cells):
        reduces = i in (cells // 3, 2 * cells // 3)
        kind = "reduction" if reduces else "normal"
        here, number = inputs(network, i, states, halved, act), 0
        for node in range(nodes):
            entering = range(number, number + 2 + node)
            total = 0.0
            for source, e in enumerate(entering):
                factor = None if noise is None else (noise[:, i, e] >= rate).to(images.dtype) / (1 - rate)
                image = edge(
                    network.cells[i].fans[source],
                    node if source < 2 else node - source + 1,
                    kept[kind][e],
                    here[source],
                    2 if reduces and source < 2 else 1,
                    x[kind][e].exp() / x[kind][e].exp().sum(),
                    act,
                    partial,
                    factor,
                )
                if f"{kind} edges" in x:
                    powers = x[f"{kind} edges"].exp()
                    image = powers[e] / powers[list(entering)].sum() * image
                total = total + image
            number += 2 + node
            here.append(total)
        states, halved = [states[1], torch.cat(here[2:], dim=1)], reduces
    return scores(network, states[1])


def final_network(network, genotype, images, cells, act="relu", masks=None):
    """Class scores of a final network in training, and the output of the cell that the auxiliary head sees."""
    states, halved, seen = [stem(network, images)] * 2, False, None
    for i in range(cells):
        reduces = i in (cells // 3, 2 * cells // 3)
        here = inputs(network, i, states, halved, act)
        entering = []
        for e, (name, source) in enumerate(genotype.reduction if reduces else genotype.normal):
            stride = 2 if reduces and source < 2 else 1
            image = operation(name, network.cells[i].operations[e], here[source], stride, act, final=True)
            identity = name == "skip" and stride == 1
            if masks is not None and not identity:
                image = masks[:, i, e, None, None, None] * image
            entering.append(image)
            if len(entering) == 2:
                here.append(entering[0] + entering[1])
                entering = []
        states, halved = [states[1], torch.cat(here[2:], dim=1)], reduces
        if i == 2 * cells // 3:
            seen = states[1]
    return scores(network, states[1]), seen
