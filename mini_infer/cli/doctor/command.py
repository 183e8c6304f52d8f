"""The command: asks, then tells."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from mini_infer.cli.doctor.machine import hardware, links, software, system, version_of
from mini_infer.cli.doctor.probe import Answer, ask
from mini_infer.cli.doctor.report import Finding, Status, as_json, as_text, gib, is_well
from mini_infer.cli.options import engine_option, given
from mini_infer.core.engine_config import engine_options

DEVICES_SECONDS = 90.0
COLLECTIVE_SECONDS = 60.0
PLAN_SECONDS = 120.0


def with_plan_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds every engine option but ``--dry-run``, which needs no memory to speak of."""
    for name, metadata in reversed(engine_options().items()):
        if name != "dry_run":
            function = engine_option(name, metadata)(function)
    return function


@click.command()
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object.")
@with_plan_options
def doctor(wants_json: bool, **options: Any) -> int:
    """Check this machine and, with --model or another engine option, whether that engine would
    start here and what it would hold. No weights are loaded or fetched.

    Exits with 1 if something that is needed, or was asked for, does not work.
    """
    details: dict[str, Any] = {}
    findings = list(examine(given(options), details))
    click.echo(as_json(findings, details) if wants_json else as_text(findings))
    return 0 if is_well(findings) else 1


def examine(options: Mapping[str, Any], details: dict[str, Any]) -> Iterator[Finding]:
    """All findings; puts the numbers behind them into ``details``."""
    yield from software()
    yield from hardware()
    yield from system()
    if version_of("torch") is None:
        return
    found = ask("devices", {}, DEVICES_SECONDS)
    details["devices"] = found
    yield from gpus(found)
    yield collective("gloo", 2)
    count = len(found.get("gpus", ()))
    if count > 1:
        yield collective("nccl", count)
    if options:
        details["plan"] = ask("plan", {"options": dict(options)}, PLAN_SECONDS)
        yield from plan(details["plan"], options)


def gpus(found: Answer) -> Iterator[Finding]:
    """What the probe of devices says."""
    if "error" in found:
        yield Finding("Devices", "torch", found["error"], "fail", "install torch anew")
        return
    if not found["gpus"]:
        built = f"built for CUDA {found['cuda']}" if found["cuda"] else "built without CUDA"
        yield Finding("Devices", "GPUs", f"none (torch is {built})")
        return
    yield Finding("Devices", "CUDA", f"{found['cuda']}, NCCL {found.get('nccl', 'missing')}")
    for gpu in found["gpus"]:
        name = f"GPU {gpu['index']}"
        if gpu["error"]:
            hint = "nvidia-smi says more; a restart of the driver may help"
            yield Finding("Devices", name, f"{gpu['name']}: {gpu['error']}", "fail", hint)
            continue
        memory = f"{gib(gpu['free'])} of {gib(gpu['total'])} free"
        value = f"{gpu['name']}, capability {gpu['capability']}, {memory}, a product is right"
        yield Finding("Devices", name, value, "ok")
    if version_of("triton") is None:
        hint = "pip install triton"
        yield Finding("Devices", "kernels", "torch's only, without triton: slow", "warn", hint)
    if len(found["gpus"]) > 1:
        yield from topology(found["peers"], links())


def topology(
    peers: list[list[bool]], connected: Mapping[tuple[int, int], str] | None
) -> Iterator[Finding]:
    """A line for each GPU: whose memory it can reach, and through what."""
    for first, row in enumerate(peers):
        words = []
        for second, reaches in enumerate(row):
            if first == second:
                continue
            link = (connected or {}).get((min(first, second), max(first, second)))
            words.append(f"{second}: {'yes' if reaches else 'no'}{f' ({link})' if link else ''}")
        name = f"GPU {first} reaches"
        if all(row):
            yield Finding("Devices", name, ", ".join(words), "ok")
        else:
            hint = "their ranks talk through the host's memory, which is slower"
            yield Finding("Devices", name, ", ".join(words), "warn", hint)


def collective(backend: str, size: int) -> Finding:
    """An all-reduce, tried."""
    name = f"{backend}, {size} ranks"
    found = ask("collective", {"backend": backend, "size": size}, COLLECTIVE_SECONDS)
    if "error" in found:
        hint = "--tensor-parallel-size and --pipeline-parallel-size above 1 will not work here"
        if backend == "nccl":
            hint += "; NCCL_DEBUG=INFO says why"
        return Finding("Ranks", name, found["error"], "fail", hint)
    return Finding("Ranks", name, f"1 MiB added up in {1e3 * found['seconds']:.2f} ms", "ok")


def plan(found: Answer, options: Mapping[str, Any]) -> Iterator[Finding]:
    """What the engine would take and hold, and what would help where it does not fit."""
    section = "Engine"
    if "error" in found:
        yield Finding(section, "plan", found["error"], "fail")
        return
    if "model" in found:
        yield from _sizes(found)
    if found["problem"] is not None:
        yield Finding(section, "verdict", found["problem"], "fail", found["suggestion"])
        return
    if found["fits"]:
        yield Finding(section, "verdict", "it fits", "ok")
        return
    value = (
        f"it starts, but a request may have {found['longest_request']} tokens at most, below "
        f"max_model_len {found['max_model_len']}"
    )
    # The model's own context is a limit, nothing that anybody asked for.
    status: Status = "fail" if "max_model_len" in options else "warn"
    yield Finding(section, "verdict", value, status, found["suggestion"])


def _sizes(found: Answer) -> Iterator[Finding]:
    section, num_stages = "Engine", found["pipeline_parallel_size"]
    size = num_stages * found["tensor_parallel_size"]
    ranks = f"{size} ranks" if size > 1 else "one rank"
    if num_stages > 1:
        ranks += f" in {num_stages} stages"
    on = f"{found['dtype']} on {found['device']}, {ranks}"
    yield Finding(section, "model", f"{found['model']}, {on}")
    each = (" on the largest rank" if num_stages > 1 else " on each rank") if size > 1 else ""
    weights = max(found["rank_weight_bytes"])
    yield Finding(section, "weights", f"{weights / 2**30:.2f} GiB{each}")
    if found["draft_weight_bytes"]:
        value = f"{found['draft_weight_bytes'] / 2**30:.2f} GiB{each}"
        yield Finding(section, "weights of drafts", value)
    if found["step_bytes"]:
        value = f"about {found['step_bytes'] / 2**30:.1f} GiB{each} (estimated)"
        yield Finding(section, "steps and graphs", value)
    per_token = f"{found['kv_bytes_per_token']} bytes a token{each}"
    if not found["num_kv_blocks"]:
        yield Finding(section, "KV cache", per_token)
        return
    about = "about " if found["step_bytes"] else ""
    blocks = f"{about}{found['num_kv_blocks']} blocks, {found['num_kv_tokens']} tokens"
    yield Finding(section, "KV cache", f"{per_token}; {blocks}")
    value = f"{found['num_longest_requests']} of {found['max_model_len']} tokens at once"
    yield Finding(section, "requests", value)
