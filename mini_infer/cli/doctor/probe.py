"""What needs torch, in a process of its own: a driver that hangs, or a crash in it, is a finding.

``python -m mini_infer.cli.doctor.probe NAME`` reads its arguments as JSON from standard input and
writes one JSON object to standard output.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
MATMUL_SIZE = 1024
MESSAGE_SIZE = 2**18
"""Float32 numbers that ranks add up: 1 MiB."""
RANK_SECONDS = 45.0


def ask(name: str, arguments: Mapping[str, Any], seconds: float) -> Answer:
    """A probe's answer; ``{"error": ...}`` where it has none, after ``seconds`` at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(json.dumps(dict(arguments)), timeout=seconds)
        answer: Answer = json.loads(out)
        return answer
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {seconds:.0f} s"}
    except ValueError:
        last = err.strip().rpartition("\n")[2] or f"the process ended with {process.returncode}"
        return {"error": last}
    finally:
        with suppress(ProcessLookupError, PermissionError):  # its children too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def devices() -> Answer:
    """Each GPU, whether it computes, and which of the others' memory it can reach."""
    import torch

    answer: Answer = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    if not torch.cuda.is_available():
        return answer
    if torch.distributed.is_nccl_available():
        answer["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    count = torch.cuda.device_count()
    answer["gpus"] = [_gpu(index) for index in range(count)]
    answer["peers"] = [
        [
            first == second or torch.cuda.can_device_access_peer(first, second)
            for second in range(count)
        ]
        for first in range(count)
    ]
    return answer


def _gpu(index: int) -> Answer:
    import torch

    properties = torch.cuda.get_device_properties(index)
    gpu: Answer = {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "total": properties.total_memory,
    }
    try:
        gpu["free"], gpu["total"] = torch.cuda.mem_get_info(index)
        ones = torch.ones(MATMUL_SIZE, MATMUL_SIZE, device=f"cuda:{index}")
        right = bool((ones @ ones == MATMUL_SIZE).all())
        gpu["error"] = None if right else "a matrix product is wrong"
    except RuntimeError as error:
        gpu["error"] = str(error).partition("\n")[0]
    return gpu


def collective(backend: str, size: int) -> Answer:
    """An all-reduce between ``size`` processes: seconds, once they are connected."""
    import torch  # once, for all that are forked

    if backend == "nccl" and not torch.distributed.is_nccl_available():
        return {"error": "this torch has no NCCL"}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(rank, size, backend, Path(folder)) for rank in range(size)]
        deadline = time.monotonic() + RANK_SECONDS
        while ranks and time.monotonic() < deadline:
            ranks = [pid for pid in ranks if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            time.sleep(0.01)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        answers = [_read(Path(folder) / f"answer-{rank}") for rank in range(size)]
    failed = next((answer for answer in answers if "error" in answer), None)
    return failed or answers[0]


def _fork(rank: int, size: int, backend: str, folder: Path) -> int:
    """No process of this one has touched a GPU or started a thread yet, so that it can be split."""
    if pid := os.fork():
        return pid
    try:
        try:
            answer = _reduce(rank, size, backend, folder)
        except Exception as error:
            answer = {"error": f"rank {rank}: {str(error).partition(chr(10))[0] or repr(error)}"}
        (folder / f"answer-{rank}").write_text(json.dumps(answer))
    finally:
        os._exit(0)


def _reduce(rank: int, size: int, backend: str, folder: Path) -> Answer:
    import torch

    from mini_infer.parallel.group import CollectiveError, join_ranks
    from mini_infer.parallel.rendezvous import FolderRendezvous

    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = join_ranks(rank, size, device, FolderRendezvous(folder))
    group.all_reduce_(torch.ones(MESSAGE_SIZE, device=device))  # connects them
    ones = torch.ones(MESSAGE_SIZE, device=device)
    group.slowest(0.0)
    begin = time.perf_counter()
    right = bool((group.all_reduce_(ones) == size).all())
    seconds = time.perf_counter() - begin
    if not right:
        return {"error": "a sum is wrong"}
    with suppress(CollectiveError):  # nobody leaves while another still adds up
        group.slowest(0.0)
    return {"seconds": seconds}


def _read(path: Path) -> Answer:
    try:
        answer: Answer = json.loads(path.read_text())
    except (OSError, ValueError):
        return {"error": f"{path.name.replace('answer-', 'rank ')} did not come to an end"}
    return answer


def plan(options: Mapping[str, Any]) -> Answer:
    """What an engine of these options takes of this machine: see ``cli.doctor.plan``."""
    from mini_infer.cli.doctor.plan import examine

    return examine(options)


PROBES: dict[str, Callable[..., Answer]] = {
    "devices": devices,
    "collective": collective,
    "plan": plan,
}


def main() -> None:
    """Answers; what libraries print meanwhile goes to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        arguments = json.load(sys.stdin)
        try:
            answer = PROBES[sys.argv[1]](**arguments)
        except Exception as error:
            text = " ".join(str(error).split())
            answer = {"error": text or type(error).__name__}
        json.dump(answer, out)


if __name__ == "__main__":
    main()
