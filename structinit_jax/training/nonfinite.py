"""Steps whose loss or gradient is not finite: never applied, and told."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from structinit_jax.errors import StoppedError
from structinit_jax.training.state import TrainState


def apply_if(finite: Bool[Array, ""], new: TrainState, old: TrainState) -> TrainState:
    """The new state, or the old one with the new step number; decided on the device.

    The step number moves on in any case, and with it the data and the randomness of the next step.
    """
    kept = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    return kept._replace(step=new.step)


def find(metrics: list[dict[str, Any]], last_step: int) -> dict[int, str]:
    """The steps that were not finite, with a text for each.

    Args:
      metrics: of consecutive steps, fetched from the devices.
      last_step: the number of the last of them.
    """
    first_step = last_step - len(metrics) + 1
    return {
        step: f"step {step}: loss {float(m['loss'])}, gradient norm {float(m['gradient_norm'])}"
        for step, m in enumerate(metrics, start=first_step)
        if m["nonfinite"]
    }


def stop_if_any(
    metrics: list[dict[str, Any]], last_step: int, seed: int, checkpoint_step: int | None
) -> None:
    """Ends the run at a step that was not finite, saying how to replay it.

    Args:
      metrics: as for `find`.
      last_step: as for `find`.
      seed: the run's.
      checkpoint_step: the newest checkpoint's.

    Raises:
      StoppedError: if there is one.
    """
    for step, text in find(metrics, last_step).items():
        start = f"from the checkpoint of step {checkpoint_step}" if checkpoint_step else "anew"
        raise StoppedError(
            f"{text}. The run stops and its checkpoints are as before. The batch and the "
            f"randomness of the step follow from (seed, steps before) = ({seed}, {step - 1}): the "
            f"same command starts {start} and comes to it again. Lower config.learning_rate, set "
            "config.clip_norm, or pass over such steps with --config.on_nonfinite=skip",
            exit_code=1,
        )
