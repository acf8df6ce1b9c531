"""So that the tests of this folder, and the processes they start, find `engines`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
