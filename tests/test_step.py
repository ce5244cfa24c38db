import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax

from structinit_jax.data.info import CATALOG
from structinit_jax.program import build_program, initialize, make_plan

pytestmark = pytest.mark.usefixtures("library_promotion")


def make_batch(program, masked=0):
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(0, 256, (64, 8, 8, 1), dtype=np.uint8),
        "label": rng.integers(0, 10, 64, dtype=np.int32),
    }
    if masked:
        batch["mask"] = (np.arange(64) < 64 - masked).astype(np.float32)
    return batch


@pytest.fixture
def program(tiny_config):
    return build_program(tiny_config, make_plan(tiny_config, CATALOG["digits"], 384))


def test_losses_agree_with_scipy(tiny_config, program):
    state, batch = initialize(tiny_config, program), make_batch(program)
    images = (batch["image"] / 255 - 0.3) / 0.4
    model = nnx.merge(program.graphdef, state.params, state.model_state)
    log_p = log_softmax(np.asarray(model(jnp.asarray(images, jnp.float32))[0]), axis=-1)
    sums = program.eval_step(state.params, state.model_state, batch | {"mask": np.ones(64, "f4")})
    np.testing.assert_allclose(sums["loss"], -log_p[np.arange(64), batch["label"]].sum(), rtol=1e-5)
    smoothed = 0.9 * np.eye(10)[batch["label"]] + 0.1 / 10
    metrics = program.train_step(state, batch)[1]
    np.testing.assert_allclose(metrics["loss"], -(smoothed * log_p).sum(-1).mean(), rtol=1e-5)


def test_training_images_are_augmented_by_seed_and_step(tiny_config):
    def loss_at(step):
        program = build_program(tiny_config, make_plan(tiny_config, CATALOG["digits"], 384))
        state = initialize(tiny_config, program)._replace(step=jnp.int32(step))
        return float(program.train_step(state, make_batch(program))[1]["loss"])

    plain = loss_at(3)
    tiny_config.augment.update(flip=0.5, crop="pad", mixup=0.8, erasing=0.25)
    augmented = loss_at(3)
    assert augmented == loss_at(3)
    assert len({plain, augmented, loss_at(4)}) == 3


def test_steps_lower_the_loss_and_compile_once(tiny_config, capsys):
    tiny_config.learning_rate = 1e-2
    program = build_program(tiny_config, make_plan(tiny_config, CATALOG["digits"], 384))
    state = initialize(tiny_config, program)
    batch = make_batch(program)
    losses = []
    for _ in range(12):
        state, metrics = program.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.03
    assert int(state.step) == 12
    assert program.train_step._cache_size() == 1
    assert "of the attention on target" in capsys.readouterr().out


def test_padding_does_not_count_in_evaluation(tiny_config, program):
    state = initialize(tiny_config, program)
    batch = make_batch(program, masked=20)
    padded = program.eval_step(state.params, state.model_state, batch)
    batch["image"][44:] = 0  # whatever the padding holds
    again = program.eval_step(state.params, state.model_state, batch)
    assert float(padded["count"]) == 44
    jax.tree.map(np.testing.assert_array_equal, padded, again)


def test_one_and_eight_devices_take_the_same_steps(tiny_config, program, monkeypatch):
    one_device = jax.devices()[:1]
    state = initialize(tiny_config, program)
    monkeypatch.setattr(jax, "devices", lambda: one_device)
    single = build_program(tiny_config, make_plan(tiny_config, CATALOG["digits"], 384))
    assert (program.mesh.size, single.mesh.size) == (8, 1)
    single_state = initialize(tiny_config, single)
    batch = make_batch(program)
    for _ in range(3):
        state, metrics = program.train_step(state, batch)
        single_state, single_metrics = single.train_step(single_state, batch)
        np.testing.assert_allclose(metrics["loss"], single_metrics["loss"], rtol=1e-5)


def test_drop_path_depends_on_seed_and_step_only(tiny_config):
    tiny_config.model.drop_path = 0.5
    program = build_program(tiny_config, make_plan(tiny_config, CATALOG["digits"], 384))
    batch = make_batch(program)

    def loss_at(step):
        state = initialize(tiny_config, program)._replace(step=jnp.int32(step))
        return float(program.train_step(state, batch)[1]["loss"])

    assert loss_at(3) == loss_at(3)
    assert loss_at(3) != loss_at(4)


def test_a_batch_in_parts_takes_the_step_of_the_whole(tiny_config, program):
    batch = make_batch(program)
    whole, whole_metrics = program.train_step(initialize(tiny_config, program), batch)
    tiny_config.accumulate_steps = 4
    parts_program = build_program(tiny_config, make_plan(tiny_config, CATALOG["digits"], 384))
    parts, metrics = parts_program.train_step(initialize(tiny_config, parts_program), batch)
    for name in ("loss", "accuracy", "gradient_norm"):
        np.testing.assert_allclose(metrics[name], whole_metrics[name], rtol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), parts.params, whole.params
    )


def test_averaged_weights_follow_the_weights(tiny_config):
    tiny_config.ema_decay = 0.75
    program = build_program(tiny_config, make_plan(tiny_config, CATALOG["digits"], 384))
    state = initialize(tiny_config, program)
    expected = jax.device_get(state.params["head"]["kernel"])
    np.testing.assert_array_equal(state.ema["params"]["head"]["kernel"], expected)
    for _ in range(2):
        state, _ = program.train_step(state, make_batch(program))
        expected = 0.75 * expected + 0.25 * jax.device_get(state.params["head"]["kernel"])
    np.testing.assert_allclose(state.ema["params"]["head"]["kernel"], expected, atol=1e-6)
