"""One process with NCCL: groups, FSDP2, half precision and checkpoints on a GPU equal the plain run.

One GPU shows that everything runs on the device and that sharding by one changes nothing. It cannot show messages between GPUs,
their overlap with computation, or the streams of NCCL with several ranks.
"""

import copy
import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import METHODS, PROBLEM, examples, full, network, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meha
from meha import SharedCheckpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def mesh(tmp_path):
    torch.cuda.set_device(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=f"file://{tmp_path}/rendezvous",
            rank=0,
            world_size=1,
            device_id=torch.device("cuda", 0),
        )
        yield init_device_mesh("cuda", (1,))
        dist.destroy_process_group()


def data(dtype):
    return dataclasses.replace(examples(dtype), **{name: part.cuda() for name, part in vars(examples(dtype)).items()})


def run(y, method, dtype=torch.float64, steps=20, x=None, **options):
    x = torch.linspace(-1, 1, 32, dtype=dtype, device="cuda") if x is None else x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return meha.solve(PROBLEM, x, y, method, batches=[data(dtype)], max_steps=steps, tol=None, **options)


def assert_near(found, expected, tolerance):
    for value, reference in ((found.x, expected.x), (found.y, expected.y)):
        for a, b in zip(full(value), full(reference), strict=True):
            assert a.is_cuda
            assert float((a - b).norm() / b.norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", METHODS)
def test_a_group_of_one_equals_the_plain_run(mesh, name, dtype):
    expected = run(network(dtype=dtype).cuda(), METHODS[name], dtype)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-6
    assert_near(run(network(dtype=dtype).cuda(), METHODS[name], dtype, group=dist.group.WORLD), expected, tolerance)
    assert_near(run(shard(network(dtype=dtype).cuda(), mesh), METHODS[name], dtype), expected, tolerance)


class Half(nn.Module):
    """A network that computes in bfloat16, with parameters in single precision."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, z):
        halves = {name: p.bfloat16() for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, halves, z.bfloat16())


@pytest.mark.parametrize("name", ["StochasticMEHA", "MEHA(gradients=2)"])
def test_half_precision_equals_the_plain_run(mesh, name):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    expected = run(Half(network(dtype=torch.float32).cuda()), METHODS[name], torch.float32)
    found = run(shard(network(dtype=torch.float32).cuda(), mesh, mp_policy=policy), METHODS[name], torch.float32)
    assert all(torch.isfinite(leaf).all() for leaf in full(found.x) + full(found.y))
    assert_near(found, expected, 1e-2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_on_a_gpu_go_on_bit_for_bit(mesh, tmp_path, asynchronous):
    from functools import partial

    adam = partial(torch.optim.Adam, lr=0.01)
    for method in (
        meha.StochasticMEHA(),
        meha.MEHA(x_optimizer=adam, y_optimizer=adam, theta_optimizer=adam, gamma=5.0, c=2.0),
    ):
        plain = network(dtype=torch.float32).cuda()
        whole = run(shard(copy.deepcopy(plain), mesh), method, torch.float32, steps=9)
        path = tmp_path / method.name
        for steps in (5, 9):
            checkpoint = SharedCheckpoint(path, every=2, asynchronous=asynchronous)
            found = run(shard(copy.deepcopy(plain), mesh), method, torch.float32, steps=steps, checkpoint=checkpoint)
        assert all(torch.equal(a, b) for a, b in zip(full(found.x) + full(found.y), full(whole.x) + full(whole.y), strict=True))
        assert found.history["upper"] == whole.history["upper"]
