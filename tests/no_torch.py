"""A pytest plugin under which torch and numpy are not there: what the contract and the service must do without.

python -m pytest -p tests.no_torch tests/torchstone tests/service
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

ABSENT = frozenset({"torch", "numpy", "scipy"})


class _Absent(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {fullname!r} (it is hidden for this run)", name=fullname)
        return None


sys.meta_path.insert(0, _Absent())
