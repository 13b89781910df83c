"""The work of `nvdd run`, on every rank of its group.

`main` reads, spreads and evaluates the structure once (so that what can't be run leaves no output behind), then
runs the dynamics with the writers that the job asks for, and closes with the summary and the picture. A restart
begins with a checkpoint instead, and adds to the files of the run that wrote it.

Invariant: files are rank 0's alone; what they hold doesn't depend on the number of ranks. Layer: cli.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import JsonValue

import nvdd_core
from nvdd_core.cli import output
from nvdd_core.cli.config import RunJob
from nvdd_core.cli.flags import require_file
from nvdd_core.cli.progress import ProgressHook
from nvdd_core.cli.session import (
    Session,
    closeness_note,
    describe,
    group,
    members_report,
    prepare,
    read_systems,
)
from nvdd_core.comm import CommTally, Mesh, agreed
from nvdd_core.dynamics import (
    Checkpoint,
    CheckpointWriter,
    Hook,
    HookContext,
    HookScope,
    Integrator,
    Langevin,
    LogWriter,
    ManagedHook,
    RankReport,
    TrajectoryWriter,
    VelocityVerlet,
    build_summary,
    can_plot,
    initial_velocities,
    is_due,
    plot_run,
    trim_log,
    trim_partial_frame,
    write_summary,
)
from nvdd_core.dynamics.domain_parallel import DomainParallel
from nvdd_core.errors import InputError
from nvdd_core.runtime import Batch


class LastStep:
    """A hook that calls others after the last step of a run (collective).

    Parameters
    ----------
    steps : int
        Steps of the run.
    missed : sequence of Hook
        Called where the last step isn't one of theirs.
    final : Hook
        Called in any case, and closed.
    """

    scope = HookScope.GLOBAL

    def __init__(self, steps: int, missed: Sequence[Hook], final: ManagedHook) -> None:
        self.every = max(1, steps)  # due at the first and the last step only
        self._steps, self._missed, self._final = steps, tuple(missed), final

    def __call__(self, ctx: HookContext) -> None:
        """Call the others after the last step."""
        if ctx.step != self._steps:
            return
        for hook in (*(hook for hook in self._missed if not is_due(hook, ctx.step)), self._final):
            if hook.scope is not HookScope.RANK_ZERO or ctx.mesh.rank == 0:
                hook(ctx)

    def close(self) -> None:
        """Close the final hook."""
        self._final.close()


def main(job: RunJob) -> None:
    """Run what `job` asks for (collective)."""
    with group(job) as mesh:
        saved = open_checkpoint(job, mesh)
        start = mesh.broadcast_object(0 if saved is None else saved.step)
        session = prepare(job, mesh, lambda: first_batch(job, saved), skin=job.skin)
        integrator, folder = make_integrator(job), job.output_folder()
        note = start_velocities(job, session) if job.restart is None else changes(saved, job, integrator)
        session.model(session.sharded)
        note += closeness_note(session)
        if job.capture == "on" and (why := session.model.capture_obstacle) is not None:
            note += f"nvdd: --capture on captures nothing: {why}\n"
        with agreed(mesh):
            if mesh.rank == 0:
                output.prepare_output(job)
                cut_back(job, folder, start)
                sys.stderr.write(f"nvdd: {session.sharded.n_global} atoms, {describe(job, session)}\n{note}")
        runner = DomainParallel(
            integrator, session.model, make_hooks(job, folder, integrator), capture=job.capture
        )
        session.model.timer.reset()
        before, rebuilds, begun = mesh.counter.snapshot(), session.model.n_rebuilds, time.perf_counter()
        runner.run(session.sharded, job.steps - start, start)
        wall = time.perf_counter() - begun
        report = rank_report(session, before, rebuilds, wall)
        reports = mesh.all_gather_objects(report)
        with agreed(mesh):
            if mesh.rank == 0:
                finish(job, session, folder, reports, job.steps - start)


def open_checkpoint(job: RunJob, mesh: Mesh) -> Checkpoint | None:
    """Open the checkpoint of a restart on rank 0; None elsewhere and for a run from the start (collective)."""
    saved = None
    with agreed(mesh):
        if mesh.rank == 0 and job.restart is not None:
            require_file(*job.inputs())
            saved = Checkpoint(job.restart)
            if saved.step >= job.steps:
                raise InputError(
                    f"checkpoint {job.restart}: it is at step {saved.step} already and steps is {job.steps}, the "
                    "last step of the whole run; give more --steps"
                )
    return saved


def first_batch(job: RunJob, saved: Checkpoint | None) -> Batch:
    """Return what the run begins with."""
    return read_systems(job.structure, "-1", dynamics=True) if saved is None else saved.batch()


def changes(saved: Checkpoint | None, job: RunJob, integrator: Integrator) -> str:
    """Return a note for the user where potential or integrator are not those that the checkpoint was written with."""
    other: list[str] = []
    for what, now in (("potential", potential(job)), ("integrator", integrator.parameters())):
        before = {} if saved is None else saved.info.get(what)
        if not isinstance(before, dict) or not before:
            continue  # of a file that something else wrote
        names = sorted(now.keys() | before.keys())
        other += [
            f"{name} {before.get(name, 'not given')} -> {now.get(name, 'not given')}"
            for name in names
            if before.get(name) != now.get(name)
        ]
    return f"nvdd: other than before the restart: {', '.join(other)}\n" if other else ""


def potential(job: RunJob) -> dict[str, JsonValue]:
    """Return what decides about energies and forces."""
    options = {f"option {name}": value for name, value in job.option.items()}
    return {"model": job.model, "dtype": job.dtype, **options}


def cut_back(job: RunJob, folder: Path, step: int) -> None:
    """Cut from log and trajectory what an ended run wrote after its checkpoint; the restart writes it again."""
    for name, cut in ((output.LOG, trim_log), (output.TRAJECTORY, trim_partial_frame)):
        if job.continues() and (folder / name).exists():
            cut(folder / name, step)


def start_velocities(job: RunJob, session: Session) -> str:
    """Draw velocities where the file has none and a temperature is given; return a note for the user (collective)."""
    sharded, mesh = session.sharded, session.mesh
    fastest = (
        sharded.velocities.abs().amax().reshape(1) if sharded.n_owned else sharded.positions.new_zeros(1)
    )
    moving = float(mesh.all_reduce_max_(fastest)) > 0.0
    if moving:
        unused = job.ensemble == "nve" and job.temperature is not None
        return "nvdd: velocities come from the structure file; temperature is not used\n" if unused else ""
    columns = ", ".join(name for name in sorted(sharded.fields) if name.startswith("vel"))
    note = (
        f"nvdd: {columns} is taken for data: velocities are read where ASE keeps them, as momenta\n"
        if columns
        else ""
    )
    if job.temperature is None:
        return f"{note}nvdd: the structure file has no velocities and no temperature is given; atoms start at rest\n"
    sharded.rows["velocities"] = initial_velocities(
        sharded.masses,
        sharded.ids,
        job.temperature,
        job.seed,
        mesh.all_reduce_sum_,
        exact_temperature=True,
    )
    return note


def make_integrator(job: RunJob) -> Integrator:
    """Return the integrator of the job's ensemble."""
    if job.ensemble == "nvt-langevin" and job.temperature is not None:
        return Langevin(job.dt, job.temperature, job.friction, job.seed)
    return VelocityVerlet(job.dt)


def make_hooks(job: RunJob, folder: Path, integrator: Integrator) -> list[Hook]:
    """Return the writers that the job asks for, the same on every rank."""
    hooks: list[Hook] = [
        LogWriter(folder / output.LOG, job.log_every, append=job.continues()),
        ProgressHook(job.steps, job.dt, job.log_every, sys.stderr),
    ]
    last = LastStep(job.steps, list(hooks), TrajectoryWriter(folder / output.FINAL, 1))
    if job.trajectory_every:
        trajectory = folder / output.TRAJECTORY
        hooks.append(TrajectoryWriter(trajectory, job.trajectory_every, append=job.continues()))
    if job.checkpoint_every:  # after the others, so that a restart finds what they wrote up to its step
        info = {"potential": potential(job)}
        hooks.append(
            CheckpointWriter(folder / output.CHECKPOINT, job.checkpoint_every, integrator, info=info)
        )
    return [*hooks, last]


def rank_report(session: Session, before: CommTally, rebuilds: int, wall_s: float) -> RankReport:
    """Return this rank's tally of the run (collective)."""
    mesh, model = session.mesh, session.model
    sent, phases = mesh.counter.since(before), model.timer.seconds()
    mine = model.report()[mesh.rank]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return RankReport(
        rank=mesh.rank,
        owned=mine["owned"],
        ghost=mine["ghost"],
        edges=mine["edges"],
        wall_s=wall_s,
        phases=phases,
        calls=sent.calls,
        bytes=sent.bytes,
        rebuilds=model.n_rebuilds - rebuilds,
        peak_memory_bytes=peak if sys.platform == "darwin" else peak * 1024,
    )


def finish(job: RunJob, session: Session, folder: Path, reports: Sequence[RankReport], steps: int) -> None:
    """Write summary and picture, and tell where everything is (rank 0); `steps` were done here."""
    about = {
        **job.model_dump(mode="json", exclude={"overwrite", "output"}),
        "structure": str(job.structure.resolve()),
        "cutoff": session.model.model.cutoff,
        **members_report(session.model),
        "device": session.mesh.device.type,
        "plugins": session.plugins,
        "versions": {"nvdd-core": nvdd_core.__version__, "torch": torch.__version__},
    }
    summary = build_summary(reports, steps=steps, dt_fs=job.dt, run=about)
    write_summary(folder / output.SUMMARY, summary)
    picture = can_plot()
    if picture:
        plot_run(folder / output.LOG, folder / output.SUMMARY, folder / output.PLOT)
    else:
        sys.stderr.write(
            f"nvdd: no {output.PLOT}: matplotlib is not installed (pip install 'nvdd-core[plot]')\n"
        )
    written = ", ".join(name for name in output.OURS if (folder / name).exists())
    sys.stdout.write(
        f"{session.sharded.n_global} atoms, {steps} steps in {summary['wall_s']:.1f} s on {len(reports)} "
        f"rank{'' if len(reports) == 1 else 's'}: {summary['steps_per_s']:.1f} steps/s, "
        f"{summary['ns_per_day']:.3g} ns/day\noutput in {folder}: {written}\n"
    )
