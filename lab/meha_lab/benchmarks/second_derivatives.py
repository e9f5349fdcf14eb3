"""How accurate products with second derivatives are as differences of gradients, on networks of several sizes.

    python -m meha_lab.benchmarks.second_derivatives

For each network, at its start and after 100 steps of Adam: the relative errors of f_xy [v] and f_yy [v] along v = F_y, against
exact products in double precision. It takes a minute.
"""

import torch
from meha_lab import pages
from torch import nn
from torch.nn.functional import cross_entropy

import meha
from meha.problem.oracle import Oracle
from meha.tensors.variables import Variable

EXAMPLES, INPUTS, CLASSES, TOKENS = 64, 16, 5, 8
KINDS = {"float64": torch.float64, "float32": torch.float32, "bfloat16 by autocast": torch.float32}


class Perceptron(nn.Module):
    def __init__(self, width, activation):
        super().__init__()
        inside = (nn.Linear(INPUTS * TOKENS, width), activation(), nn.Linear(width, width), activation())
        self.net = nn.Sequential(*inside, nn.Linear(width, CLASSES))

    def forward(self, tokens):
        return self.net(tokens.flatten(1))


class Transformer(nn.Module):
    def __init__(self, width, activation):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, activation, batch_first=True)
        self.into, self.encoder = nn.Linear(INPUTS, width), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        return self.out(self.encoder(self.into(tokens)).mean(1))


NETWORKS = {
    "perceptron, 32 wide": lambda: Perceptron(32, nn.Tanh),
    "perceptron, 512 wide": lambda: Perceptron(512, nn.GELU),
    "transformer, 32 wide": lambda: Transformer(32, "gelu"),
    "transformer, 128 wide": lambda: Transformer(128, "gelu"),
    "transformer, 128 wide, relu": lambda: Transformer(128, "relu"),
}


def levels(dtype, half=False):
    """F and f of a classifier, whose examples x weighs."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, EXAMPLES, TOKENS, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(CLASSES, (2, EXAMPLES), generator=generator)

    def losses(y, level):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return cross_entropy(y(tokens[level]), labels[level], reduction="none")

    return meha.Problem(lambda x, y: losses(y, 1).mean(), lambda x, y: (x.sigmoid() * losses(y, 0)).mean())


def network(name, steps):
    """In double precision, trained for some steps."""
    torch.manual_seed(0)
    y, x0, problem = NETWORKS[name]().double(), torch.zeros(EXAMPLES, dtype=torch.float64), levels(torch.float64)
    optimizer = torch.optim.Adam(y.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        problem.lower(x0, y).backward()
        optimizer.step()
    return y


def products(y, problem, dtype, vector=None, differences=""):
    """v = F_y if it is not given, and the products of f_xy and f_yy with it, in double precision."""
    x, y = Variable(torch.zeros(EXAMPLES, dtype=dtype), "x"), Variable(y.to(dtype), "y")
    oracle = Oracle(problem, x, y)
    oracle.lacking = differences
    if vector is None:
        _, vector = oracle.gradient(y, [(1.0, oracle.upper, x, y)])
    found = oracle.hessian([(1.0, oracle.lower, x, y)])([leaf.to(dtype) for leaf in vector], x, y)
    return vector, [torch.cat([leaf.double().flatten() for leaf in part]) for part in found]


def errors(name, steps, kind):
    """The relative errors of both products."""
    vector, exact = products(network(name, steps), levels(torch.float64), torch.float64)
    dtype = KINDS[kind]
    _, found = products(network(name, steps), levels(dtype, "bfloat16" in kind), dtype, vector, "measured here")
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def main():
    torch.set_num_threads(1)
    rows = []
    for name in NETWORKS:
        for steps in (0, 100):
            cells = ["{:.0e}, {:.0e}".format(*errors(name, steps, kind)) for kind in KINDS]
            rows.append([name, str(sum(p.numel() for p in NETWORKS[name]().parameters())), str(steps), *cells])
            print(rows[-1], flush=True)
    print("\n".join(pages.markdown(("network", "parameters", "steps", *KINDS), rows)))


if __name__ == "__main__":
    main()
