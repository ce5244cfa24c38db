"""The training loop. Read it from top to bottom."""

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from clu import parameter_overview
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax import files
from structinit_jax.data.loader import make_loader
from structinit_jax.errors import NotFiniteError, PreemptedError, require_function
from structinit_jax.training import build, checkpoint, distributed, sharding
from structinit_jax.training import state as state_lib
from structinit_jax.training import workdir as workdir_lib
from structinit_jax.training.checkpoint_files import read_run
from structinit_jax.training.evaluation import make_evaluator, write_by_class
from structinit_jax.training.metrics import MetricsLog, Progress, StepTrace, average
from structinit_jax.training.step import MAX_IN_FLIGHT, make_train_step


def train(
    config: ConfigDict,
    workdir: str | Path,
    profile_step: int | None = None,
    stop_request: distributed.StopRequest | None = None,
    on_evaluation: Callable[[int, dict[str, float]], bool | None] | None = None,
) -> dict[str, float]:
    """Trains a model. If the workdir holds a checkpoint, training resumes from it.

    Args:
      config: See `structinit_jax.config.base_config`.
      workdir: Output directory for `config.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`
        and `per_class.csv`. A path, or an object storage URL such as gs://BUCKET/RUN.
      profile_step: First of four steps to trace to `profile/`, counted from the start or resume.
      stop_request: Records SIGTERM and SIGINT. A caller that trains several runs passes its own and
        checks it between runs, because a signal during the last step raises no `StoppedError`.
      on_evaluation: Called with the step and the results of each evaluation in training, after they
        are logged and while the checkpoint is being written. If it returns True, training ends.

    Returns:
      The results of the last evaluation.

    Raises:
      InputError: The config, the data or the workdir cannot be used.
      PreemptedError: A signal stopped the run.
      NotFiniteError: The state is not finite.
      FullDiskError: The disk is full. In all three cases, checkpoints are intact.
    """
    with contextlib.ExitStack() as on_exit:
        began = time.perf_counter()
        on_exit.enter_context(build.explain_errors())
        on_exit.enter_context(files.report_full_disk(workdir))

        # -- Mesh, data and workdir ----------------------------------------------------------------
        config_lib.validate(config)
        mesh = build.make_mesh(config)
        if on_evaluation is not None:
            require_function("on_evaluation", on_evaluation, ("step", "results"))
        with distributed.shared_errors():
            dataset = build.open_data(config)
            build.require_outside_images(config, workdir)
        # Lock the workdir before reading images, which can take a long time.
        workdir = on_exit.enter_context(workdir_lib.open_workdir(workdir))
        with distributed.shared_errors():
            train_source, eval_source = build.open_splits(config, dataset)

        # -- Schedule, model, optimizer and step: checked here, allocated below --------------------
        schedule = build.make_schedule(config, len(train_source))
        model = build.make_model(config, mesh)
        optimizer = build.make_optimizer(config, schedule.learning_rate, model)
        abstract_state = state_lib.abstract_state(model, optimizer, config.ema_decay > 0)
        step_function = make_train_step(config, model, optimizer, schedule.learning_rate)
        train_step = build.jit_step(step_function, mesh, abstract_state)

        # -- Record of the run, which is saved with each checkpoint, and checked on resume ---------
        names = list(dataset.class_names)
        record = workdir_lib.make_record(config, train_source, eval_source, names)
        workdir_lib.check_processes(record, workdir)
        print(f"devices: {sharding.describe(mesh)}")

        checkpoints = checkpoint.Checkpoints(workdir / "checkpoints", config.keep_checkpoints)
        on_exit.callback(checkpoints.close)
        start_step = checkpoints.latest_step or 0
        place = f"step {start_step} in {workdir}"
        if start_step:
            saved = read_run(checkpoints.directory / str(start_step))
            workdir_lib.check_resume(saved, record, config, schedule.num_steps, place)
        with distributed.shared_errors():  # a host may lack the file of `config.start_from`
            initialize = None if start_step else state_lib.make_initializer(config, model)

        # -- Training step -------------------------------------------------------------------------
        # Compiled ahead of time, so that a batch or state of an unexpected shape raises an error
        # instead of recompiling. XLA compiles in its own thread while state and batches are
        # prepared. JAX traces here, because its context managers are thread-local.
        lowered = train_step.lower(abstract_state, build.abstract_batch(config, mesh), build.SEED)
        distributed.check_program(lowered)
        compiling = ThreadPoolExecutor(1, "compile").submit(lowered.compile)

        # -- State: initialized, or restored from the newest checkpoint ----------------------------
        init_metrics = {}
        if start_step:
            state = checkpoint.restore(checkpoints.directory, start_step, abstract_state)
            print(f"resumed from {place}")
        else:
            print(parameter_overview.get_parameter_overview(model.params, include_stats=False))
            initial = initialize()
            init_metrics = initial.metrics
            state = state_lib.initialize_state(*initial.weights, optimizer, abstract_state)
            del initial  # Its memory was donated to the state.
        del initialize  # Its program has constants as large as attention maps.
        # A run that has reached its last step keeps the config that it was trained with.
        if jax.process_index() == 0 and start_step < schedule.num_steps:
            text = json.dumps(record["config"], indent=2)
            files.write_atomically(workdir / "config.json", f"{text}\n")
        log = MetricsLog(workdir, start_step)
        on_exit.callback(log.close)
        if init_metrics:
            log.write(0, init_metrics)

        # -- Batches, evaluation and compiled step -------------------------------------------------
        loader = make_loader(train_source, mesh, build.make_crop(config))
        stream = build.train_batches(config, loader, start_step, schedule.num_steps)
        on_exit.callback(stream.close)
        # The first batch takes longer than the others (a split in device memory compiles its
        # gather, other splits start threads), so it is made while the training step compiles.
        batches = itertools.chain(list(itertools.islice(stream, 1)), stream)
        evaluate = make_evaluator(config, model, eval_source)
        train_step = compiling.result()
        data_bytes = build.data_bytes(config, len(train_source), len(eval_source))
        memory = build.check_memory(train_step, data_bytes, build.memory_limit())
        print(f"memory per device: {memory}")

        # -- Loop ----------------------------------------------------------------------------------
        print(
            f"training on {len(train_source):,} examples for {schedule.num_steps:,} steps "
            f"({schedule.num_steps / schedule.steps_per_epoch:.1f} epochs), "
            f"evaluating on {len(eval_source):,} of {dataset.name} {config.data.eval_split}",
            flush=True,
        )
        initial_share = config.ema_decay**schedule.num_steps
        if initial_share > 0.01:
            print(
                f"note: the initial weights will still make up {initial_share:.0%} of the averages "
                f"that are evaluated: lower config.ema_decay={config.ema_decay}"
            )
        # Metrics stay on the devices until they are logged. Waiting for each step's metrics would
        # leave the devices idle until the host starts the next step.
        pending = {}
        progress = Progress(start_step, schedule, config.batch_size)
        first_traced = None if profile_step is None else start_step + profile_step
        trace = StepTrace(workdir, first_traced)
        on_exit.callback(trace.close)
        trace.after(start_step, state)
        # The seed is put on the devices because the loop disallows implicit transfers.
        seed = jax.device_put(np.uint32(config.seed), sharding.replicated(mesh))
        stop_request = on_exit.enter_context(stop_request or distributed.StopRequest())
        evaluation = None
        # An implicit transfer would wait for the devices in every step, so it is an error.
        on_exit.enter_context(jax.transfer_guard("disallow"))
        for step in range(start_step + 1, schedule.num_steps + 1):
            with progress.wait("data"):
                batch = next(batches)
            state, metrics = train_step(state, batch, seed)
            pending[step] = metrics
            # The host stays at most MAX_IN_FLIGHT steps ahead: each step holds a batch in memory.
            jax.block_until_ready(pending.get(step - MAX_IN_FLIGHT))
            trace.after(step, state)
            if step == start_step + 1:
                # Waiting only for this step costs little and shows how long startup took.
                jax.block_until_ready(metrics)
                print(f"first step after {time.perf_counter() - began:.1f} s", flush=True)

            is_last = step == schedule.num_steps
            evaluates = step in schedule.eval_steps
            stops = stop_request.reached(step - start_step) and not is_last
            saves = evaluates or stops or step % config.checkpoint_every_steps == 0
            # Metrics are also logged with every checkpoint, because a run that resumes from it does
            # not repeat the earlier steps.
            if saves or step % config.log_every_steps == 0:
                steps = jax.device_get(pending)
                pending.clear()
                _check_finite(steps, checkpoints, config)
                values = average(steps) | progress.measure(step)
                log.write(step, values)
                progress.show(step, values)
            if evaluates:
                with progress.wait("evaluation"):
                    evaluation = evaluate(state)
                results = evaluation.metrics
                log.write(step, results)
                print(f"step {step}  {evaluation}", flush=True)
            if saves:
                accuracy = results["eval/accuracy"] if evaluates else None
                with progress.wait("checkpoint"):
                    # A run that resumes from this checkpoint needs the log up to this step.
                    log.upload()
                    checkpoints.save(step, state, record | {"accuracy": accuracy})
            if evaluates and on_evaluation:
                with progress.wait("evaluation"), jax.transfer_guard("allow"):
                    ends = on_evaluation(step, dict(results))
                if isinstance(ends, bool | np.bool_) and ends:  # a logger may return a count
                    break
            if stops:
                checkpoints.wait_for_all()
                raise PreemptedError(
                    f"stopped by a signal after step {step} of {schedule.num_steps}, with a "
                    "checkpoint: run the same command again to resume"
                )
        if not evaluation:  # The run had already reached its last step.
            evaluation = evaluate(state)
        if jax.process_index() == 0:
            write_by_class(workdir, evaluation, names)
        checkpoints.wait_for_all()
        results = evaluation.metrics
        print(
            f"done: accuracy {results['eval/accuracy']:.4f} after {checkpoints.latest_step} steps, "
            f"{time.perf_counter() - began:.0f} s; results in {workdir}"
        )
        return results


def _check_finite(steps, checkpoints, config):
    """Raises `NotFiniteError` for the first step after which the state is not finite."""
    for step, values in steps.items():
        if values["finite"]:
            continue
        checkpoints.wait_for_all()
        trust = " --trust_workdir" if config_lib.own_code(config) else ""
        raise NotFiniteError(
            f"after step {step} the state is not finite (loss {values['loss']}, gradient norm "
            f"{values['gradient_norm']}, learning rate {values['learning_rate']}).\n"
            f"To see the images of this step, run python -m structinit_jax.show --step={step} "
            f"--workdir={checkpoints.directory.parent}{trust}. The training command resumes from "
            f"step {checkpoints.latest_step or 0} and repeats the step: lower config.learning_rate "
            "or set config.clip_norm"
        )
