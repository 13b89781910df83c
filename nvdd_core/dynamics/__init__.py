"""Integrators, hooks and files of a run over owned rows. Layer: dynamics."""

from nvdd_core.dynamics.blocks import RowBlock, iter_row_blocks
from nvdd_core.dynamics.checkpoint import Checkpoint, CheckpointWriter, write_checkpoint
from nvdd_core.dynamics.domain_parallel import DomainParallel
from nvdd_core.dynamics.files import replace_file, write_json
from nvdd_core.dynamics.hooks import (
    FinalHook,
    Hook,
    HookContext,
    HookScope,
    ManagedHook,
    RestartHook,
    StepInfo,
    any_begins_anew,
    any_due,
    close_hooks,
    finish_hooks,
    is_due,
    run_hooks,
)
from nvdd_core.dynamics.integrators import Integrator, Langevin, VelocityVerlet
from nvdd_core.dynamics.noise import normal
from nvdd_core.dynamics.observables import (
    degrees_of_freedom,
    kinetic_energy,
    kinetic_tensor,
    momentum,
    pressure,
    temperature,
)
from nvdd_core.dynamics.plot import can_plot, plot_run, read_log
from nvdd_core.dynamics.state import MDState
from nvdd_core.dynamics.summary import RankReport, build_summary, write_summary
from nvdd_core.dynamics.velocities import (
    initial_velocities,
    maxwell_boltzmann,
    remove_momentum,
    rescale_to_temperature,
)
from nvdd_core.dynamics.writers import LogWriter, TrajectoryWriter, trim_log, trim_partial_frame

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "DomainParallel",
    "FinalHook",
    "Hook",
    "HookContext",
    "HookScope",
    "Integrator",
    "Langevin",
    "LogWriter",
    "MDState",
    "ManagedHook",
    "RankReport",
    "RestartHook",
    "RowBlock",
    "StepInfo",
    "TrajectoryWriter",
    "VelocityVerlet",
    "any_begins_anew",
    "any_due",
    "build_summary",
    "can_plot",
    "close_hooks",
    "degrees_of_freedom",
    "finish_hooks",
    "initial_velocities",
    "is_due",
    "iter_row_blocks",
    "kinetic_energy",
    "kinetic_tensor",
    "maxwell_boltzmann",
    "momentum",
    "normal",
    "plot_run",
    "pressure",
    "read_log",
    "remove_momentum",
    "replace_file",
    "rescale_to_temperature",
    "run_hooks",
    "temperature",
    "trim_log",
    "trim_partial_frame",
    "write_checkpoint",
    "write_json",
    "write_summary",
]
