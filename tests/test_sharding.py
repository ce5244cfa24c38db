import collections
import math
import re

import jax
import pytest
from conftest import set_up
from jax.sharding import PartitionSpec
from test_augment import RECIPE

from structinit_jax.errors import InputError
from structinit_jax.models import default_config
from structinit_jax.training.evaluation import make_eval_step
from structinit_jax.training.sharding import MIN_SIZE_TO_SHARD, make_mesh

pytestmark = pytest.mark.usefixtures("library_promotion")


def num_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_sent(program):
    """Returns the bytes of a compiled program's collectives by kind, counting loop iterations."""
    totals = {}  # by computation; callees come first
    computations = re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", program, re.M | re.S)
    for name, body in computations:
        total = totals[name] = collections.Counter()
        for result, kind, rest in re.findall(r" = (.*?) ([a-z-]+)\((.*)", body):
            if kind in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
                shapes = [shape.split(",") for shape in re.findall(r"[fu]32\[([\d,]*)\]", result)]
                total[kind] += sum(4 * math.prod(int(n) for n in shape if n) for shape in shapes)
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
            for called in re.findall(r"(?:body|to_apply|calls)=%([\w.-]+)", rest):
                times = int(trips[1]) if trips else 1
                total.update({kind: times * size for kind, size in totals[called].items()})
    return totals[name]


def compile_step(config):
    setup = set_up(config)
    return setup, setup.train_step.lower(*setup.arguments).compile()


@pytest.fixture
def wide_config(tiny_config):
    """A model whose matrices are large enough to be split."""
    tiny_config.model.update(width=128, num_heads=2)
    tiny_config.attention_init = dict(name="default")
    return tiny_config


@pytest.mark.slow
@pytest.mark.parametrize("on_cuda", [False, True])
def test_data_parallel_devices_exchange_only_gradients(wide_config, on_cuda, monkeypatch):
    def choose(*arguments, default, cuda=None, cpu=None):
        return (cuda or default)(*arguments)

    if on_cuda:  # the operations that CUDA devices would run, on CPUs
        monkeypatch.setattr(jax.lax, "platform_dependent", choose)
    # As many images as a device holds; for RandAugment see test_augment.py.
    wide_config.augment.update(RECIPE, mix_group=8, rand_augment="")
    wide_config.model.drop_path = 0.1
    setup, step = compile_step(wide_config)
    loss = 4  # bytes; there is no accuracy with mixing
    gradients = num_bytes(setup.abstract_state.params)
    sent = bytes_sent(step.as_text())
    assert sent.keys() == {"all-reduce"}
    assert sent["all-reduce"] == gradients + loss
    # The state is donated: the step writes the new state over the old one.
    assert step.memory_analysis().alias_size_in_bytes == num_bytes(setup.abstract_state)


def test_averages_are_sharded_like_the_weights(wide_config):
    wide_config.update(fsdp=4, ema_decay=0.9)
    state = set_up(wide_config).abstract_state
    assert state.ema == {"params": state.params, "model_state": state.model_state}


def test_split_weights_are_gathered_and_images_stay_where_they_are(wide_config):
    wide_config.fsdp = 4
    setup, step = compile_step(wide_config)
    leaves = jax.tree.leaves(setup.abstract_state.params)
    split = [leaf for leaf in leaves if "fsdp" in leaf.sharding.spec]
    assert len(split) == 6  # query, key, value, out, fc1, fc2
    sent = bytes_sent(step.as_text())
    assert sent.keys() == {"all-gather", "all-reduce"}
    assert sent["all-gather"] == 2 * num_bytes(split)  # forward and backward
    # The devices of a copy reduce whole gradients, on accelerators with a reduce-scatter; then each
    # device reduces its own part with the other copies.
    gradients = num_bytes(setup.abstract_state.params) + num_bytes(split) / 4
    assert gradients <= sent["all-reduce"] < gradients + 200  # and norms
    whole = num_bytes(setup.abstract_state) - 3 * num_bytes(split)  # with Adam's moments
    expected = whole + 3 * num_bytes(split) / 4
    assert step.memory_analysis().alias_size_in_bytes == pytest.approx(expected, rel=0.01)


def test_the_model_state_is_replicated(tiny_config):
    sizes = dict(num_classes=10, width=128, depth=2, kernel_size=8)
    tiny_config.model = default_config("convmixer") | sizes | dict(spatial_filters="fixed")
    tiny_config.fsdp = 4
    state = set_up(tiny_config).abstract_state
    kernel = state.model_state["blocks"]["spatial"]["kernel"]
    assert kernel.size >= MIN_SIZE_TO_SHARD
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.model_state))
    weights = state.params["blocks"]["channel"]["kernel"]
    assert weights.sharding.spec == PartitionSpec(None, "fsdp")


def test_an_evaluation_gathers_one_block_at_a_time(wide_config):
    wide_config.fsdp = 4
    setup = set_up(wide_config)
    model, batch = setup.model, setup.abstract_batch
    step = jax.jit(make_eval_step(model, (0.3,), (0.4,)))
    step = step.lower(model.params, model.model_state, batch).compile()
    weights = [w for w in jax.tree.leaves(model.params) if "fsdp" in w.sharding.spec]
    assert bytes_sent(step.as_text())["all-gather"] == num_bytes(weights)
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", step.as_text())
    sizes = [math.prod(map(int, shape.split(","))) for shape in gathered]
    assert max(sizes) == max(weight.size // 2 for weight in weights)  # 2 blocks


def test_a_group_that_does_not_divide_the_devices_is_refused():
    with pytest.raises(InputError, match=r"fsdp=3 must be a divisor of 8"):
        make_mesh(fsdp=3)
