"""Start-up: command to first chat answer of the dry run, against a bare FastAPI + uvicorn server.

Both are started by turns, in the same run on the same machine, so that the ratio means something
where seconds do not. The bare server has one route that returns a constant.

    python benchmarks/startup.py --runs 5 --output startup.json
"""

import argparse
import json
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

BARE_SERVER = """
import sys
import uvicorn
from fastapi import FastAPI

app = FastAPI()

@app.post("/v1/chat/completions")
async def hello():
    return {"hello": "world"}

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
# The console script's own lines, and then a look at what was imported.
DRY_RUN = """
import sys
from mini_infer.cli.main import serve_main
code = serve_main()
print("torch" in sys.modules)
sys.exit(code)
"""
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
}
POLL_SECONDS = 0.005
GIVE_UP_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ask(port: int) -> bool:
    """One chat request; False while nobody listens."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(QUESTION).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=GIVE_UP_SECONDS) as answer:
            json.load(answer)
            return True
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionError):
            return False
        raise


def seconds_to_first_answer(command: list[str], port: int) -> float:
    """Starts the command, asks until it answers, stops it."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while not ask(port):
                elapsed = time.perf_counter() - started
                if process.poll() is not None or elapsed > GIVE_UP_SECONDS:
                    raise SystemExit(f"{' '.join(command[:2])} does not answer")
                time.sleep(POLL_SECONDS)
            return time.perf_counter() - started
        finally:
            process.terminate()


def dry_run_imports_torch() -> bool:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", DRY_RUN, "--dry-run", "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        while not ask(port):
            time.sleep(POLL_SECONDS)
        process.terminate()
        output, _ = process.communicate()
    return output.splitlines()[-1] != "False"


def dry_run_command(port: int) -> list[str]:
    """The installed console script, or the same lines where it is not installed."""
    beside = Path(sys.executable).with_name("mini-infer-serve")
    script = str(beside) if beside.exists() else shutil.which("mini-infer-serve")
    start = [script] if script else [sys.executable, "-c", DRY_RUN]
    return [*start, "--dry-run", "--port", str(port)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="starts of each server")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    parser.add_argument(
        "--quick", action="store_const", dest="runs", const=1, help="one start of each"
    )
    arguments = parser.parse_args()
    bare: list[float] = []
    dry: list[float] = []
    # One start of each beforehand fills the page cache and compiles the bytecode.
    for run in range(-1, arguments.runs):
        port = free_port()
        of_bare = seconds_to_first_answer([sys.executable, "-c", BARE_SERVER, str(port)], port)
        port = free_port()
        of_dry = seconds_to_first_answer(dry_run_command(port), port)
        if run >= 0:
            bare.append(of_bare)
            dry.append(of_dry)
    result = {
        "benchmark": "startup",
        "bare_fastapi_seconds": round(statistics.median(bare), 4),
        "dry_run_seconds": round(statistics.median(dry), 4),
        "ratio": round(statistics.median(dry) / statistics.median(bare), 3),
        "torch_imported": dry_run_imports_torch(),
        "runs": {"bare_fastapi": bare, "dry_run": dry},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in ("fastapi", "uvicorn", "pydantic")},
    }
    print(f"{'':24}median of {arguments.runs}")
    print(f"{'bare FastAPI + uvicorn':24}{result['bare_fastapi_seconds']:.3f} s")
    print(f"{'mini-infer dry run':24}{result['dry_run_seconds']:.3f} s")
    print(f"{'ratio':24}{result['ratio']:.2f}")
    print(f"{'torch imported':24}{'yes' if result['torch_imported'] else 'no'}")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
