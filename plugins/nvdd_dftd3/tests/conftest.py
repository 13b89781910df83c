"""The tests of nvdd-dftd3 share what ranks do and the structures; workers import that module by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
