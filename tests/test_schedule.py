import numpy as np
import pytest

from structinit_jax.config import base_config
from structinit_jax.training.schedule import learning_rate_schedule


def make(num_steps=100, steps_per_epoch=10.0, **fields):
    config = base_config()
    config.update(
        learning_rate=1.0, final_learning_rate=0.1, warmup_epochs=2.0, warmup_learning_rate=0.2
    )
    config.update(**fields)
    return learning_rate_schedule(config, num_steps=num_steps, steps_per_epoch=steps_per_epoch)


def test_warm_up_is_linear_and_the_rest_a_cosine():
    schedule = make()
    np.testing.assert_allclose(schedule(10), 0.6, rtol=1e-6)
    np.testing.assert_allclose(schedule(20), 1.0, rtol=1e-6)
    expected = 0.1 + 0.9 * (1 + np.cos(np.pi * 0.25)) / 2
    np.testing.assert_allclose(schedule(40), expected, rtol=1e-6)
    np.testing.assert_allclose(schedule(100), 0.1, rtol=1e-6)


def test_cool_down_stays_at_the_final_rate():
    schedule = make(cooldown_epochs=3.0)
    np.testing.assert_allclose(schedule(70), 0.1, rtol=1e-6)
    np.testing.assert_allclose(schedule(95), 0.1, rtol=1e-6)
    assert schedule(69) > 0.1


@pytest.mark.parametrize("num_steps", [1, 2, 15])
def test_runs_shorter_than_the_warm_up_have_finite_rates(num_steps):
    rates = [float(make(num_steps=num_steps)(step)) for step in range(num_steps)]
    assert np.all(np.isfinite(rates))
    assert max(rates) <= 1


def test_no_warm_up_starts_at_the_peak():
    np.testing.assert_allclose(make(warmup_epochs=0.0)(0), 1.0)
