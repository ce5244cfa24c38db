"""Training and evaluation, to be read top to bottom: data, model, steps, checkpoints, loop."""

import contextlib
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax import resume
from structinit_jax.data import datasets
from structinit_jax.data.examples import check_examples, load_examples
from structinit_jax.data.feed import Feed, make_feed
from structinit_jax.data.imagenet import EvaluationSet, open_imagenet_evaluation
from structinit_jax.errors import InputError, StoppedError
from structinit_jax.program import Program, build_program, initialize, make_plan, parameter_table
from structinit_jax.training import (
    checkpoint,
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
from structinit_jax.training.state import TrainState

# Steps dispatched ahead of the device: enough to keep it busy, few enough that their batches fit.
MAX_IN_FLIGHT = 2
# Of a run that a signal stopped: EX_TEMPFAIL of sysexits.h, "try again later".
PREEMPTED_EXIT_CODE = 75


def evaluate(
    config: ConfigDict, program: Program, state: TrainState, feed: Feed
) -> dict[str, float]:
    """Exact loss and accuracy over all examples, whatever the split: 'test/loss', 'test/accuracy'.

    Where the state has averaged weights, 'test/ema_loss' and 'test/ema_accuracy' are theirs.
    """
    weights = {"test/": (state.params, state.model_state)}
    if state.ema:
        weights["test/ema_"] = (state.ema["params"], state.ema["model_state"])
    results = {}
    for prefix, model in weights.items():
        sums = []
        for batch in feed.eval_batches(batch_size=config.batch_size):
            sums.append(program.eval_step(*model, batch))
            jax.block_until_ready(sums[-MAX_IN_FLIGHT - 1 : -MAX_IN_FLIGHT])
        totals = jax.tree.map(lambda *leaves: float(np.sum(leaves)), *jax.device_get(sums))
        results[f"{prefix}loss"] = totals["loss"] / totals["count"]
        results[f"{prefix}accuracy"] = totals["correct"] / totals["count"]
    return results


def open_data(config: ConfigDict) -> datasets.Dataset:
    """Opens the config's data set and checks that the model fits it."""
    data = config.data
    dataset = datasets.open_dataset(data.name, data.data_dir or None, data.manual_dir or None)
    check_examples(
        dataset.facts,
        num_classes=config.model.num_classes,
        channels=data.channels,
    )
    return dataset


def open_evaluation_set(
    config: ConfigDict, dataset: datasets.Dataset | None = None
) -> EvaluationSet:
    """The config's test split of its own data set, or the test set of ImageNet that it names."""
    data = config.data
    if data.eval_name:  # its folder is TFDS's, where the training set's is an image folder
        root = None if data.name == "folder" else data.data_dir or None
        evaluation_set = open_imagenet_evaluation(data.eval_name, root, data.on_bad_image)
        check_examples(
            evaluation_set.facts, num_classes=config.model.num_classes, channels=data.channels
        )
        return evaluation_set
    dataset = dataset or open_data(config)
    source = dataset.split(data.eval_split, "data.eval_split", data.on_bad_image)
    return EvaluationSet(f"{data.name} {data.eval_split}", source, dataset.facts)


def _local_path(workdir: str | Path) -> Path:
    if "://" in str(workdir):
        raise InputError(
            f"--workdir={workdir} is the address of a store, and needs to be a folder: mount the "
            "store on every host (a bucket of Google Cloud with gcsfuse) and give its path"
        )
    return Path(workdir).absolute()


def prepare_workdir(workdir: str | Path) -> Path:
    """Makes the run's folder and checks that it can be written to."""
    path = _local_path(workdir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(2**16))  # a full disk takes empty files
    except OSError as error:
        raise InputError(
            f"--workdir={workdir} cannot be written to ({error.strerror}): give another folder"
        ) from error
    return path


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
    workdir = prepare_workdir(workdir)
    if jax.process_index() == 0:
        on_exit.enter_context(lock_workdir(workdir))

    # -- data --------------------------------------------------------------------------------------
    dataset = open_data(config)
    train_source = dataset.split(
        config.data.train_split, "data.train_split", config.data.on_bad_image
    )
    evaluation_set = open_evaluation_set(config, dataset)
    plan = make_plan(config, dataset.facts, len(train_source))

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
    route = plan.route
    train_examples = load_examples(
        train_source, dataset.facts, route.image_size, random_resized_crop=route.host_crop
    )
    train_feed = make_feed(train_examples, program.mesh)
    eval_feed = make_eval_feed(config, program, evaluation_set)
    batches = train_feed.train_batches(
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
                    results = evaluate(config, program, state, eval_feed)
                log.write(step, results)
                progress.note(f"step {step}  {_describe(results)}")
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
        results = evaluate(config, program, state, eval_feed)
    print(
        f"done: test accuracy {results[BEST_METRIC]:.4f} after {plan.num_steps} steps, "
        f"{time.perf_counter() - began:.0f} s{memory.describe()}; results in {workdir}"
    )
    return results


def restore_newest(program: Program, workdir: str | Path) -> tuple[int, TrainState]:
    """The newest checkpoint's step and state.

    Raises:
      InputError: if there is no checkpoint, or it is of another architecture.
    """
    directory = _local_path(workdir) / "checkpoints"
    if not directory.is_dir():
        raise InputError(f"--workdir={workdir} holds no checkpoints: train there first")
    restored = checkpoint.restore_newest(directory, program.abstract_state)
    if restored is None:
        raise InputError(f"--workdir={workdir} holds no whole checkpoint: train there first")
    return restored


def make_eval_feed(config: ConfigDict, program: Program, evaluation_set: EvaluationSet) -> Feed:
    """The test images at the model's size, on their way to the devices."""
    size, crop = config.data.image_size, config.data.crop_fraction
    return make_feed(
        load_examples(evaluation_set.source, evaluation_set.facts, size, crop), program.mesh
    )


def evaluate_checkpoint(config: ConfigDict, workdir: str | Path) -> dict[str, float]:
    """Restores the newest checkpoint of a workdir, evaluates it and prints the result.

    Raises:
      InputError: if there is no checkpoint, or it is of another architecture.
    """
    config_lib.validate(config)
    evaluation_set = open_evaluation_set(config)
    plan = make_plan(config, evaluation_set.facts, len(evaluation_set.source))
    program = build_program(config, plan, evaluation_set)
    step, state = restore_newest(program, workdir)
    run = checkpoint.read_run(_local_path(workdir) / "checkpoints", step)
    if changed := resume.differences_in_evaluation(run, config):
        print("\n".join(["note: the checkpoint was trained with another config:", *changed]))
    results = evaluate(config, program, state, make_eval_feed(config, program, evaluation_set))
    count = len(evaluation_set.source)
    print(f"step {step}  {_describe(results)} on {count:,} examples of {evaluation_set.name}")
    return results


def _describe(results: dict[str, float]) -> str:
    """Such as 'test loss 0.0613  test accuracy 0.9833'."""
    return "  ".join(
        f"{name.replace('/', ' ').replace('_', ' ')} {value:.4f}" for name, value in results.items()
    )
