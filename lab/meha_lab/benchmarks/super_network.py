"""Passes of the super-network of architecture search: python -m meha_lab.benchmarks.super_network [--batch 256] [--cells 3]

Prints milliseconds of a forward and backward pass, one by one and recorded as a CUDA graph, with the operations of an edge as
plain modules and evaluated together. Without a GPU it prints the times on the CPU.
"""

import argparse
import contextlib
import time

import torch
from meha_lab.tasks.architecture_search import SearchSpace, SuperNetwork
from meha_lab.tasks.architecture_search.operations import FactorisedReduction, Pool, SeparableConv, Skip
from torch.nn.functional import cross_entropy

from meha.running.compiled import record

TOGETHER = {kind: kind.together for kind in (FactorisedReduction, Pool, SeparableConv, Skip)}
CONVOLVE = SeparableConv._convolve


@contextlib.contextmanager
def plain_modules():
    """Evaluate the operations one by one, with depthwise and pointwise convolutions."""
    try:
        for kind in TOGETHER:
            del kind.together
        SeparableConv._convolve = lambda self, operations, layer, x: CONVOLVE(self, operations, layer, x, fused=False)
        yield
    finally:
        for kind, together in TOGETHER.items():
            kind.together = staticmethod(together)
        SeparableConv._convolve = CONVOLVE


def make_pass(batch, cells, half, device):
    network = SuperNetwork(SearchSpace(), cells=cells).to(device)
    images, labels = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    images = images.contiguous(memory_format=torch.channels_last) if half else images
    x = {kind: (1e-3 * torch.randn(14, 8, device=device)).requires_grad_() for kind in ("normal", "reduction")}
    leaves = [*network.parameters(), *x.values()]

    def one_pass():
        with torch.autocast(device, torch.bfloat16, enabled=half):
            loss = cross_entropy(network(images, x).float(), labels)
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    return one_pass


def milliseconds(function, count, wait):
    function()
    wait()
    begin = time.perf_counter()
    for _ in range(count):
        function()
    wait()
    return 1000 * (time.perf_counter() - begin) / count


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--cells", type=int, default=3)
    asked = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device, wait = ("cuda", torch.cuda.synchronize) if on_gpu else ("cpu", lambda: None)
    for form, context in (("plain modules", plain_modules), ("together", contextlib.nullcontext)):
        for half in (False, True) if on_gpu else (False,):
            with context():
                one_pass = make_pass(asked.batch, asked.cells, half, device)
                times = {"one by one": milliseconds(one_pass, 3, wait)}
                if on_gpu:
                    times["recorded"] = milliseconds(record(one_pass), 10, wait)
            shown = ", ".join(f"{name} {value:.1f} ms ({1000 / value:.1f} a second)" for name, value in times.items())
            print(f"{form}, {'bfloat16' if half else 'float32'}, batch {asked.batch}: {shown}")


if __name__ == "__main__":
    main()
