"""Where a benchmark's numbers go: a JSON object that says on what, when and with what it ran."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from draftlayers.device import device_name
from draftlayers.project import code_state, versions, write_atomically


def whole(record: dict[str, Any]) -> dict[str, Any]:
    """A record with what says on what, when and with what it was made."""
    return {
        **record,
        "device": device_name(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": versions(),
        **code_state(),
    }


def write(record: dict[str, Any], to: Path | str) -> None:
    """Write a record to a file, or to standard output when `to` is ``-``."""
    text = json.dumps(whole(record), indent=1) + "\n"
    if str(to) == "-":
        print(text, end="")
    else:
        write_atomically(Path(to), text.encode())
