"""One process with NCCL: groups, FSDP2, half precision and checkpoints on a GPU equal the plain run.

One GPU shows that everything runs on the device and that sharding by one changes nothing. It cannot show messages between GPUs,
their overlap with computation, or the streams of NCCL with several ranks.
"""

import copy
import dataclasses
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes import ALL, METHODS, NORMALISED, PROBLEM, adapters, away, divided, examples, full, lower, network, shard, upper
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import meha
from meha import SharedCheckpoint

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch warns about its own prototypes
]

DEVICE = torch.device("cuda", 0)
MOST = {torch.float64: 1e-12, torch.float32: 1e-6}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.fixture
def mesh(tmp_path):
    torch.cuda.set_device(DEVICE)
    meeting = f"file://{tmp_path}/meeting"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=meeting, rank=0, world_size=1)
    yield init_device_mesh(DEVICE.type, (1,))
    dist.destroy_process_group()


def data(dtype):
    return dataclasses.replace(examples(dtype), **{name: part.to(DEVICE) for name, part in vars(examples(dtype)).items()})


def weights(dtype):
    return torch.linspace(-1, 1, 32, dtype=dtype, device=DEVICE)


def model(dtype, make=network):
    return make(dtype=dtype).to(DEVICE)


def run(y, method, dtype=torch.float64, steps=20, x=None, problem=PROBLEM, **options):
    x = weights(dtype) if x is None else x
    return meha.solve(problem, x, y, method, batches=[data(dtype)], max_steps=steps, tol=None, **options)


def assert_near(found, expected, most):
    assert all(leaf.device == DEVICE for leaf in full(found.x) + full(found.y))
    errors = away(found.x, expected.x), away(found.y, expected.y)
    assert max(errors) < most, errors


@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize("name", [name for name in ALL if name not in NORMALISED])
def test_a_group_of_one_equals_the_plain_run(mesh, name, dtype):
    expected = run(model(dtype), ALL[name], dtype)
    assert_near(run(model(dtype), ALL[name], dtype, group=dist.group.WORLD), expected, MOST[dtype])
    assert_near(run(shard(model(dtype), mesh), ALL[name], dtype), expected, MOST[dtype])


@pytest.mark.parametrize("name", ["StochasticMEHA", "MEHA(gradients=2)"])
def test_adapters_and_weights_by_example_equal_the_plain_run(mesh, name):
    dtype = torch.float64
    expected = run(model(dtype, adapters), METHODS[name], dtype)
    sharded, x = shard(model(dtype, adapters), mesh), divided(weights(dtype), mesh)
    assert_near(run(sharded, METHODS[name], dtype, x=x), expected, MOST[dtype])


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
    expected = run(Half(model(torch.float32)), METHODS[name], torch.float32, steps=10)
    found = run(shard(model(torch.float32), mesh, mp_policy=HALF), METHODS[name], torch.float32, steps=10)
    assert_near(found, expected, 1e-2)


def flat_lower(x, y, batch):
    """An objective whose values hardly differ, beside their size."""
    return 1 + 1e-6 * lower(x, y, batch)


def test_differences_within_rounding_of_half_precision_are_told(mesh):
    for policy, count in ((HALF, 1), (MixedPrecisionPolicy(), 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = shard(model(torch.float32), mesh, mp_policy=policy)
            run(y, meha.StochasticMEHA(), torch.float32, steps=16, problem=meha.Problem(upper, flat_lower))
        found = [str(warning.message) for warning in caught if issubclass(warning.category, meha.TrainingWarning)]
        assert len(found) == count, found
        assert all("at step 16" in text and "bfloat16" in text for text in found)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_checkpoints_on_a_gpu_go_on_bit_for_bit(mesh, tmp_path, wrapped, asynchronous):
    adam = partial(torch.optim.Adam, lr=0.01)
    options = {"dtype": torch.float32, "group": dist.group.WORLD}
    for method in (
        meha.StochasticMEHA(),
        meha.MEHA(x_optimizer=adam, y_optimizer=adam, theta_optimizer=adam, gamma=5.0, c=2.0),
    ):
        plain = model(torch.float32)

        def start(plain=plain):
            y = copy.deepcopy(plain)
            return shard(y, mesh) if wrapped else y

        whole = run(start(), method, steps=9, **options)
        for steps in (5, 9):
            checkpoint = SharedCheckpoint(tmp_path / method.name, every=2, asynchronous=asynchronous)
            found = run(start(), method, steps=steps, checkpoint=checkpoint, **options)
        assert all(torch.equal(a, b) for a, b in zip(full(found.x) + full(found.y), full(whole.x) + full(whole.y), strict=True))
        assert found.history["upper"] == whole.history["upper"]
