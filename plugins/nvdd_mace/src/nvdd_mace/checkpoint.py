"""Reads a model file of mace-torch: safely by default, with the file's own code only where the user says so.

Key objects: `read_model`. mace writes whole modules by pickle, and a pickle is a program. By default nothing of it is
run: the file is read as data (`nvdd_mace.records`) and the model is made anew by the installed mace
(`nvdd_mace.rebuild`). ``trust=True`` unpickles it, with everything that this can do. Layer: plugin.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nvdd_core.errors import InputError
from nvdd_mace.foreign import quiet
from nvdd_mace.rebuild import rebuild
from nvdd_mace.records import read_records, require_checkpoint


def read_model(checkpoint: str, *, trust: bool = False) -> torch.nn.Module:
    """Return the module in a file, on the CPU, in the file's dtype.

    Parameters
    ----------
    checkpoint : str
        Path; ``~`` is the home folder.
    trust : bool
        Unpickle it, which runs whatever code the file holds.

    Raises
    ------
    InputError
        When it isn't there, is no model, names what model files don't, or can't be rebuilt.
    """
    path = Path(checkpoint).expanduser()
    if not trust:
        return rebuild(read_records(path), str(path))
    require_checkpoint(path)
    try:
        with quiet():
            found = torch.load(path, weights_only=False, map_location="cpu")
    except Exception as error:
        raise InputError(f"mace: {path} can't be loaded ({type(error).__name__}: {error})") from error
    if not isinstance(found, torch.nn.Module):
        raise InputError(
            f"mace: {path} holds a {type(found).__name__}, not a model; give the .model file of mace-torch"
        )
    return found
