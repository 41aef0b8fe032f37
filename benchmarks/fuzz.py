"""Tries many thousands of hostile configurations, files and batches, in a new order each time, and says how many.

    python benchmarks/fuzz.py --examples 20000

What fails is shrunk and shown by hypothesis, with the values that fail.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=2000, help="inputs for each property")
    os.environ["DATAFLEX_FUZZ_EXAMPLES"] = str(parser.parse_args().examples)
    # Read when the tests are imported.
    import pytest

    started = time.time()
    tests = Path(__file__).parent.parent / "tests" / "test_hostile.py"
    plugin = Counting()
    code = pytest.main([str(tests), "-q", "-p", "no:cacheprovider", "-o", "timeout=0"], plugins=[plugin])
    tried = ", ".join(f"{num} {kind}" for kind, num in plugin.tried.items())
    print(f"tried {tried} in {time.time() - started:.0f} s: {'all as promised' if code == 0 else 'see above'}")
    raise SystemExit(code)


class Counting:
    """A pytest plugin that takes over what the tests have counted."""

    tried: dict[str, int] = {}

    def pytest_sessionfinish(self) -> None:
        from tests.hostile import TRIED

        self.tried = dict(TRIED)


if __name__ == "__main__":
    main()
