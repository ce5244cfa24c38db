import platform
import sys

import jax
import pytest

from structinit_jax.attention_init import AttentionSite, impulse, sincos_positions
from structinit_jax.dry_run import dry_run, find_target
from structinit_jax.errors import InputError

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_sizes_and_costs_are_printed_without_data_and_memory(tiny_config, capsys):
    tiny_config.model.update(num_classes=1000, depth=1)
    tiny_config.data.update(name="imagenet2012", channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    tiny_config.data.eval_split = "validation"
    live = len(jax.live_arrays())
    dry_run(tiny_config)
    assert len(jax.live_arrays()) <= live + 20  # a few keys and constants, no state
    out = capsys.readouterr().out
    counts = "384 training examples (train[:384]), 50,000 evaluation examples (validation)"
    steps = "12 (2.0 epochs of 6.0 steps); "
    for text in ("head/kernel", "64 global", "name=impulse", "memory per device", counts, steps):
        assert text in out


def test_mistakes_are_found_without_data(tiny_config):
    for section, field, value in (
        (tiny_config.attention_init, "target_mass", 7.0),
        (tiny_config.data, "train_split", "trian"),
        (tiny_config.model, "num_classes", 3),
        (tiny_config, "label_smoothing", 1.0),
    ):
        section[field] = value
        with pytest.raises(InputError, match=rf"{field}.*{value!r}"):
            dry_run(tiny_config)


needs_libtpu = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="libtpu has no wheel"
)


@needs_libtpu
def test_a_step_is_compiled_for_a_tpu_slice(tiny_config, capsys):
    tiny_config.model.depth = 1
    dry_run(tiny_config, "tpu-v5e:2x2")
    out = capsys.readouterr().out
    assert "4 × TPU v5 lite" in out
    assert "64 global, 16 per device, 64 per process" in out
    assert " of 16,128 MiB: " in out


@needs_libtpu
def test_impulse_is_compiled_for_a_tpu():
    # In bfloat16, the default on TPUs, libtpu crashed on the solve.
    positions = sincos_positions((8, 8), 96)
    sizes = dict(width=96, num_heads=3, head_dim=32, num_layers=2, qk_scale=32**-0.5)
    site = AttentionSite(grid=(8, 8), **sizes, positions=positions)
    sharding = jax.sharding.SingleDeviceSharding(find_target("tpu-v5e:2x2")[0])
    draw = jax.jit(lambda rng: impulse()(rng, site), in_shardings=sharding, out_shardings=sharding)
    assert "while" in draw.lower(jax.eval_shape(jax.random.key, 0)).compile().as_text()


@needs_libtpu
def test_a_step_that_does_not_fit_is_refused_with_remedies(tiny_config):
    tiny_config.model.depth = 1
    tiny_config.batch_size = 2**25
    with pytest.raises(InputError, match=r"memory.*config\.model\.remat=dots"):
        dry_run(tiny_config, "tpu-v5e:2x2")


@needs_libtpu
def test_slices_of_several_hosts_have_their_devices():
    devices = find_target("tpu-v4:2x2x4")
    assert len(devices) == 16  # one per chip, not one per core
    assert {device.process_index for device in devices} == set(range(4))


@pytest.mark.parametrize("name", ["tpu-v5e:3x5", "a100", "h100:8"])
def test_unknown_targets_are_refused(name):
    with pytest.raises(InputError, match=f"--target='{name}' is"):
        find_target(name)
