"""Real processes, as a user starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = [sys.executable, "tests/training.py"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def started(command: list[str], output: IO[Any]) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)


def run(*commands: list[str]) -> None:
    """All at once; a failure or a hang of one ends the others."""
    # Files, because a full pipe that nobody reads would stop the process.
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        processes = [started(command, output) for command, output in zip(commands, outputs)]
        try:
            for process, output in zip(processes, outputs):
                process.wait(timeout=100)
                output.seek(0)
                assert process.returncode == 0, output.read().decode()[-4000:]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])
