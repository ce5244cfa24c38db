"""Training, to be read top to bottom: data, model, steps, checkpoints, loop."""

import contextlib
import itertools
import json
import time
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax import resume
from structinit_jax.data.loader import make_loader
from structinit_jax.errors import InputError, StoppedError
from structinit_jax.evaluate import (
    describe,
    evaluate,
    make_eval_loader,
    open_data,
    open_evaluation_set,
)
from structinit_jax.program import (
    MAX_IN_FLIGHT,
    build_program,
    initialize,
    make_plan,
    parameter_table,
)
from structinit_jax.training import (
    compilations,
    files,
    flops,
    memory,
    nonfinite,
    preemption,
    profiling,
)
from structinit_jax.training import mesh as mesh_lib
from structinit_jax.training.checkpoint import BEST_METRIC, Checkpoints
from structinit_jax.training.lock import lock_workdir
from structinit_jax.training.metrics import MetricsLog, average
from structinit_jax.training.progress import Progress

# Of a run that a signal stopped: EX_TEMPFAIL of sysexits.h, "try again later".
PREEMPTED_EXIT_CODE = 75


def train(
    config: ConfigDict,
    workdir: str | Path,
    profile_steps: tuple[int, int] | tuple[None, None] = (None, None),
) -> dict[str, float]:
    """Trains to the end of the plan, from the newest checkpoint in the workdir if there is one.

    Args:
      config: see `structinit_jax.config.base_config`.
      workdir: gets `config.json`, `metrics.jsonl`, `tensorboard/` and `checkpoints/`.
      profile_steps: the first and the last step to trace into `profile/`.

    Returns:
      The last evaluation's metrics.

    Raises:
      InputError: for a mistake in the config, the data or the workdir.
      StoppedError: if a signal asked for it or a step was not finite; checkpoints are whole.
    """
    with contextlib.ExitStack() as on_exit:
        return _train(config, workdir, profile_steps, on_exit)


def _train(
    config: ConfigDict, workdir: str | Path, profile_steps, on_exit: contextlib.ExitStack
) -> dict[str, float]:
    began = time.perf_counter()
    config_lib.validate(config)
    workdir = files.prepare_workdir(workdir)
    if jax.process_index() == 0:
        on_exit.enter_context(lock_workdir(workdir))

    # -- data --------------------------------------------------------------------------------------
    dataset = open_data(config)
    train_source = dataset.split(
        config.data.train_split, "data.train_split", config.data.on_bad_image
    )
    evaluation_set = open_evaluation_set(config, dataset)
    plan = make_plan(config, dataset.info, len(train_source))

    # -- model and start state, or the newest checkpoint -------------------------------------------
    program = build_program(config, plan, evaluation_set)
    print(f"devices: {mesh_lib.describe(program.mesh)}")
    print(parameter_table(program))
    checkpoints = on_exit.enter_context(
        contextlib.closing(Checkpoints(workdir / "checkpoints", config.keep_checkpoints))
    )
    start_step = checkpoints.latest_step or 0
    unread = []  # metrics of the steps since the last log line, fetched only when it is written
    if start_step:
        saved = checkpoints.run(start_step)
        changed = resume.check(saved, config, len(train_source), f"step {start_step} in {workdir}")
        if changed:
            print("\n".join(["config changed since the checkpoint:", *changed]))
        if start_step > plan.num_steps:
            raise InputError(
                f"--workdir={workdir} holds a checkpoint of step {start_step}, but the config ends "
                f"at step {plan.num_steps}: raise config.num_epochs, or use another --workdir"
            )
        state = checkpoints.restore(start_step, program.abstract_state)
        unread = [{k: np.float32(v) for k, v in metrics.items()} for metrics in saved["unread"]]
        print(f"resumed from step {start_step} in {checkpoints.directory}")
    else:
        state = initialize(config, program)
    profiling.check_steps(*profile_steps, start_step, plan.num_steps)
    if jax.process_index() == 0:
        with files.explain_failure("the config", workdir):
            files.write_whole(workdir / "config.json", config.to_json(indent=2) + "\n")

    # -- batches -----------------------------------------------------------------------------------
    train_loader = make_loader(
        train_source,
        dataset.info,
        program.mesh,
        image_size=plan.augmentation.image_size,
        random_crop=plan.augmentation.host_crop,
    )
    eval_loader = make_eval_loader(config, program, evaluation_set)
    batches = train_loader.train_batches(
        batch_size=config.batch_size,
        seed=config.seed,
        start_step=start_step,
        num_steps=plan.num_steps,
        repeats=config.data.repeats,
    )

    # -- loop --------------------------------------------------------------------------------------
    print(
        f"training on {len(train_source):,} examples for {plan.num_steps:,} steps "
        f"({plan.num_steps / plan.steps_per_epoch:.1f} epochs), "
        f"testing on {len(evaluation_set.source):,}",
        flush=True,
    )
    # Drawn ahead: it compiles what gathers a batch, or starts the threads that decode.
    batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
    # Compiled ahead, so that no other shape can slip in and compile again in the loop.
    train_step = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    log = on_exit.enter_context(contextlib.closing(MetricsLog(workdir, start_step)))
    progress = Progress(
        start_step,
        plan.num_steps,
        plan.steps_per_epoch,
        config.batch_size,
        flops.peak_speed(config, program.mesh),
    )
    run = {"config": json.loads(config.to_json()), "num_examples": len(train_source)}
    results: dict[str, float] = {}
    trace = profiling.StepTrace(workdir / "profile", *profile_steps)
    compiled = False  # whether everything that the loop calls has been called
    stop_request = on_exit.enter_context(preemption.listen())
    with jax.transfer_guard("disallow"):
        for step, batch in enumerate(progress.watch(batches), start=start_step + 1):
            trace.before(step)
            state, metrics = train_step(state, batch)
            if text := trace.after(step, state):
                progress.note(text)
            unread.append(metrics)
            jax.block_until_ready(unread[-MAX_IN_FLIGHT - 1 : -MAX_IN_FLIGHT])
            if step == start_step + 1:
                jax.block_until_ready(metrics)
                seconds = time.perf_counter() - began
                progress.note(f"first step after {seconds:.1f} s{memory.describe()}")
            if step % config.log_every_steps == 0 or step == plan.num_steps:
                unread = jax.device_get(unread)
                if config.on_nonfinite == "stop":
                    nonfinite.stop_if_any(unread, step, config.seed, checkpoints.latest_step)
                for text in nonfinite.find(unread, step).values():
                    progress.note(f"{text}: skipped")
                values = average(unread)
                unread = []
                values |= progress.measure(step)
                log.write(step, values)
                progress.show(step, values)
                if (names := compilations.take()) and compiled:
                    progress.note(compilations.warning(names))
            evaluated = step in plan.eval_steps
            stopping = stop_request.reached(step) and step < plan.num_steps
            if not (evaluated or stopping or step % config.checkpoint_every_steps == 0):
                continue
            jax.block_until_ready(state)  # steps still under way are no part of the pauses
            unread = jax.device_get(unread)
            if config.on_nonfinite == "stop":  # before it is past the step that would be replayed
                nonfinite.stop_if_any(unread, step, config.seed, checkpoints.latest_step)
            if evaluated:
                with progress.pause("evaluation"):
                    results = evaluate(config, program, state, eval_loader)
                log.write(step, results)
                progress.note(f"step {step}  {describe(results)}")
            run["unread"] = [{k: float(v) for k, v in m.items()} for m in unread]
            with progress.pause("checkpoint"):
                checkpoints.save(step, state, run, results if evaluated else None)
            if stopping:
                checkpoints.wait()
                raise StoppedError(
                    f"stopped by a signal after step {step} of {plan.num_steps}, with a checkpoint "
                    "of it: give the same command again to go on",
                    exit_code=PREEMPTED_EXIT_CODE,
                )
            if evaluated and not compiled:
                compilations.take()
                compiled = True
    if not results:  # the run had ended before; say again how
        results = evaluate(config, program, state, eval_loader)
    print(
        f"done: test accuracy {results[BEST_METRIC]:.4f} after {plan.num_steps} steps, "
        f"{time.perf_counter() - began:.0f} s{memory.describe()}; results in {workdir}"
    )
    return results
