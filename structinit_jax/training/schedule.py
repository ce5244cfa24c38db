"""Learning rate over steps: linear warm-up, cosine, cool-down."""

import optax
from ml_collections import ConfigDict


def learning_rate_schedule(
    config: ConfigDict, *, num_steps: int, steps_per_epoch: float
) -> optax.Schedule:
    """From `warmup_learning_rate` up to `learning_rate`, then down to `final_learning_rate`.

    The last `cooldown_epochs` stay at the final rate. A warm-up longer than the rest is cut.
    """
    cosine_end = max(1, num_steps - round(config.cooldown_epochs * steps_per_epoch))
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), cosine_end - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.warmup_learning_rate if warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=cosine_end,
        end_value=min(config.final_learning_rate, config.learning_rate),
    )
