"""Exceptions raised by nvdd, one tree for every layer.

::

    NvddError                      exit code 1
    |- InputError                  exit code 2: the user can mend the input (also a ValueError)
    |  |- PluginNotFoundError      no installed plugin provides that name
    |  |- PluginUnusableError      the plugin is installed but broken, disabled, incompatible or in conflict
    |  `- SpecError                a distribution spec or a run file that can't be served
    |- PluginValidationError       a plugin's declarations are malformed
    |- AdapterError                an adapter could not be installed or restored
    |  `- AdapterConflictError     two owners want the same target
    `- DistributedError            the group of ranks can't go on
       |- RankLostError            a rank died or stopped answering
       |- PeerError                another rank failed; carries its rank and message
       |- PluginMismatchError      ranks see different sets of plugins
       `- NumericalError           a result is not finite

The message says what, where (rank, plugin, op, global row id), found against expected, and
what to do. Layer: errors (the lowest; standard library only).
"""

from __future__ import annotations


class NvddError(Exception):
    """Base class of every error that nvdd raises on purpose."""

    exit_code = 1


class InputError(NvddError, ValueError):
    """The input can't be used as it is; the message says what to change."""

    exit_code = 2


class PluginNotFoundError(InputError):
    """No installed plugin provides the name asked for."""


class PluginUnusableError(InputError):
    """The plugin asked for is installed but can't be used; chains the original error."""


class SpecError(InputError):
    """A distribution spec, a run file or an option that can't be served."""


class PluginValidationError(NvddError):
    """A plugin declares something malformed."""


class AdapterError(NvddError):
    """An adapter could not be installed or restored."""


class AdapterConflictError(AdapterError):
    """Two owners ask for the same target."""


class DistributedError(NvddError):
    """The group of ranks can't go on."""


class RankLostError(DistributedError):
    """A rank died or stopped answering."""


class PeerError(DistributedError):
    """Another rank failed with an error of a type that can't be rebuilt here."""


class PluginMismatchError(DistributedError):
    """The ranks see different sets of plugins."""


class NumericalError(DistributedError):
    """A result is not finite; the message names the first rows at fault."""
