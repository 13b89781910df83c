"""``python -m nvdd_core.testing NAME``: every suite for an installed plugin. Layer: testing."""

from __future__ import annotations

from nvdd_core.testing.runner import main

if __name__ == "__main__":
    main()
