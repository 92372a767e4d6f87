"""Places along a row's way where tests let a worker die: BATCHMILL_FAILPOINT=name or name:n (at its n-th passing).

Numbered in the order a row passes them. Without the variable a failpoint is one dictionary look-up.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

FAILPOINTS = (
    "after_claim",  # 1: the lease is taken, nothing was sent
    "after_reserve",  # 2: calls are booked, not sent
    "after_call",  # 3: the provider answered, nothing is saved
    "before_commit",  # 4: results are written in a transaction that is not committed
    "after_commit",  # 5: results are saved, the chunk is still leased
    "before_release",  # 6: every row is saved or handed back
    "after_release",  # 7: the attempt has ended, the message is not acknowledged
)

VARIABLE = "BATCHMILL_FAILPOINT"
_name, _, _nth = os.environ.get(VARIABLE, "").partition(":")
_passed: Counter[str] = Counter()

if _name and _name not in FAILPOINTS:
    raise SystemExit(f"{VARIABLE} names {_name!r}; there are {', '.join(FAILPOINTS)}")


def failpoint(name: str) -> None:
    """Kills this process with SIGKILL if the environment says so."""
    if name != _name:
        return
    _passed[name] += 1
    if _passed[name] >= int(_nth or 1):
        os.kill(os.getpid(), signal.SIGKILL)
