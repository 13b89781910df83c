"""The work of `nvdd validate`. Layer: cli."""

from __future__ import annotations

import json
import sys

from nvdd_core.cli.session import read_systems, strategy_kind
from nvdd_core.cli.streams import stdout_kept
from nvdd_core.cli.validate_cmd import ValidateJob
from nvdd_core.runtime import MLIPSpec
from nvdd_core.validate import trace_and_validate


def main(job: ValidateJob) -> int:
    """Validate what `job` names, write the report to standard output and return the exit code."""
    with stdout_kept() as out:  # models print what they like, also on ranks
        report = trace_and_validate(
            job.model,
            read_systems(job.structure, "-1"),
            ranks=job.ranks,
            strategy=strategy_kind(job.strategy),
            spec=None if job.spec is None else MLIPSpec.load(job.spec),
            options=job.option,
            device=job.device,
            dtype=job.dtype,
            fix=job.fix,
            tell=_tell,
        )
        text = (
            json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n" if job.as_json else report.text()
        )
        out.write(text)
        out.flush()
        if job.save is not None and report.spec is not None:  # last: a full disk doesn't cost the report
            report.spec.save(job.save)
    return 0 if report.passed else 1


def _tell(text: str) -> None:
    sys.stderr.write(f"nvdd: {text}\n")
    sys.stderr.flush()
