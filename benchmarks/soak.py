"""Twenty minutes of everything at once: nothing leaks, nobody waits for ever, no answer changes.

Clients send mixed requests to one server for the whole time: streamed or not, chat or completions,
short or long, of one choice or several, with shared prefixes, greedy or sampled. A third hang up at
a random moment, some before the first byte, and some requests are wrong. The KV cache is small, so
that requests are preempted. At the end

- every request had an answer: a whole one, or an error object where it was wrong;
- every greedy text equals that of the same request on the unloaded server;
- nothing runs, waits or holds a block, and one last request needs every block that there is;
- the server's memory grew by less than 2 % after warm-up.

    mini-infer bench soak
    mini-infer bench soak --minutes 2
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness import Bar, Report, median, positive
from servers import (
    RunningServer,
    describe_servers,
    make_server_parser,
    mini_infer_server,
    model_options,
    parse_quick,
    started,
)

from mini_infer.cli.load.client import PATHS, open_session
from mini_infer.cli.load.run import run_loop
from mini_infer.cli.load.workload import Words

if TYPE_CHECKING:
    import aiohttp

BLOCK_SIZE = 16
ANSWER_SECONDS = 120
"""Longest that a request may take here, before it counts as one without an answer."""
WARM_UP = 0.25
"""Share of the time after which memory may not grow any more."""
SAMPLES = 40
"""Of memory, over the whole time."""
WRONG: tuple[tuple[str, Any, int], ...] = (
    ("chat", {"messages": []}, 400),
    ("chat", {"messages": [{"role": "user", "content": "x"}], "temperature": -1}, 400),
    ("chat", {"messages": [{"role": "user", "content": "x"}], "model": "other"}, 404),
    ("completions", {"prompt": "x " * 4000}, 400),
    ("completions", {"prompt": [10**9]}, 400),
    ("completions", {"prompt": "x", "n": 10**6}, 400),
    ("completions", "not a JSON object", 400),
)
"""Endpoint, body and the status that it deserves."""


@dataclass
class Tally:
    """What happened to the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_compared: int = 0
    seconds: list[float] = field(default_factory=list)

    def fault(self, text: str) -> None:
        self.faults.append(text)
        print(f"  FAULT: {text}", file=sys.stderr)


@dataclass(frozen=True)
class Kind:
    """A greedy request, and the texts of its choices on the unloaded server."""

    endpoint: str
    body: dict[str, Any]
    texts: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_server_parser(__doc__, repeats=1)
    parser.add_argument("--minutes", type=float, default=20.0, help="of load")
    parser.add_argument("--max-model-len", type=positive, default=1024, help="and of the cache")
    parser.add_argument("--clients", type=positive, default=12, help="at any time")
    parser.add_argument("--kinds", type=positive, default=40, help="different greedy requests")
    arguments = parse_quick(parser, argv, minutes=0.1, kinds=6)
    num_blocks = arguments.max_model_len // BLOCK_SIZE
    command = mini_infer_server(
        *(
            *model_options(arguments),
            "--max-model-len",
            arguments.max_model_len,
            "--log-interval",
            0,
        ),
        *("--block-size", BLOCK_SIZE, "--num-kv-blocks", num_blocks, "--max-num-seqs", 8),
    )
    tally = Tally()
    with started(command) as server:
        memory, metrics, all_blocks = run_loop(soak(server, arguments, tally))
    report = Report(
        "soak",
        f"{arguments.minutes:g} minutes, {arguments.clients} clients",
        describe_servers(
            arguments,
            **{
                "prompt and output tokens": f"up to {arguments.max_model_len}",
                "KV blocks": num_blocks,
            },
        ),
    )
    total = sum(tally.outcomes.values())
    before, after = memory_before_and_after(memory)
    report.rows = [{"outcome": name, "requests": n} for name, n in tally.outcomes.most_common()]
    report.rows += [{"outcome": "all", "requests": total}]
    report.bars = [
        Bar("requests without the answer they deserve", float(len(tally.faults)), at_most=0),
        Bar("memory growth after warm-up, %", 100 * (after / before - 1), at_most=2),
        Bar("KV blocks in use afterwards, %", 100 * metrics["vllm:kv_cache_usage_perc"], at_most=0),
        Bar("served at the end with every block, 1 is yes", float(all_blocks), at_least=1),
    ]
    report.notes = [
        f"greedy texts compared with the unloaded server's: {tally.num_compared}",
        f"requests preempted: {metrics['vllm:num_preemptions_total']:.0f}",
        f"slowest answer: {max(tally.seconds, default=0):.1f} s",
        f"memory: {before / 2**20:.0f} MiB after warm-up, {after / 2**20:.0f} MiB at the end",
        *tally.faults[:20],
    ]
    report.samples = {"server MiB": [round(value / 2**20, 1) for value in memory]}
    report.finish(arguments.output)


async def soak(
    server: RunningServer, arguments: Any, tally: Tally
) -> tuple[list[int], dict[str, float], bool]:
    """Samples of memory, the metrics at the end, and whether all blocks were free then."""
    rng = random.Random(arguments.seed)
    async with open_session() as session:
        kinds = [await learn(session, server, rng) for _ in range(arguments.kinds)]
        seconds = 60 * arguments.minutes
        end = time.monotonic() + seconds
        memory: list[int] = []

        async def watch() -> None:
            while time.monotonic() < end:
                memory.append(await asyncio.to_thread(server.resident_bytes))
                await asyncio.sleep(seconds / SAMPLES)

        async def client(number: int) -> None:
            own = random.Random(f"{arguments.seed} {number}")
            while time.monotonic() < end:
                await one_request(session, server, own, kinds, tally)

        await asyncio.gather(watch(), *map(client, range(arguments.clients)))
        if not await asyncio.to_thread(server.wait_until_idle, ANSWER_SECONDS):
            tally.fault("requests still run after their clients are gone")
        memory.append(await asyncio.to_thread(server.resident_bytes))
        metrics = await asyncio.to_thread(server.metrics)
        return memory, metrics, await takes_every_block(session, server, arguments.max_model_len)


async def learn(
    session: "aiohttp.ClientSession", server: RunningServer, rng: random.Random
) -> Kind:
    """Makes up a greedy request and asks it of the unloaded server."""
    words = Words()
    endpoint = rng.choice(tuple(PATHS))
    prompt = words.text(rng, rng.choice((8, 40, 120, 300)))
    if rng.random() < 0.5:
        prompt = f"{words.text(random.Random('shared'), 64)} {prompt}"
    body: dict[str, Any] = {"temperature": 0, "max_tokens": rng.choice((4, 16, 48))}
    body |= rng.choice(({}, {}, {"n": 2}, {"stop": [" the", "\n"]}, {"ignore_eos": True}))
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    async with session.post(server.url + PATHS[endpoint], json=body) as response:
        answer = await response.json()
    if response.status != 200:
        raise SystemExit(f"the unloaded server refused a request: {answer}")
    return Kind(endpoint, body, texts_of(answer))


async def one_request(
    session: "aiohttp.ClientSession",
    server: RunningServer,
    rng: random.Random,
    kinds: Sequence[Kind],
    tally: Tally,
) -> None:
    """Sends something, and sees to its answer or hangs up."""
    start = time.monotonic()
    chance = rng.random()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            if chance < 1 / 3:
                outcome = await hang_up(session, server, rng, rng.choice(kinds))
            elif chance < 0.4:
                outcome = await wrong(session, server, rng, tally)
            elif chance < 0.5:
                outcome = await sampled(session, server, rng, rng.choice(kinds), tally)
            else:
                outcome = await greedy(session, server, rng, rng.choice(kinds), tally)
    except TimeoutError:
        tally.fault(f"no answer within {ANSWER_SECONDS} seconds")
        outcome = "no answer"
    except OSError as error:  # aiohttp's connection errors are that, too
        tally.fault(f"{type(error).__name__}: {error}")
        outcome = "connection lost"
    tally.seconds.append(time.monotonic() - start)
    tally.outcomes[outcome] += 1


async def hang_up(
    session: "aiohttp.ClientSession", server: RunningServer, rng: random.Random, kind: Kind
) -> str:
    """Leaves before the answer, or in the middle of its stream."""
    streams = rng.random() < 0.7
    body = {**kind.body, "stream": streams, "max_tokens": 100, "ignore_eos": True}
    reading = asyncio.ensure_future(_read_all(session, server.url + PATHS[kind.endpoint], body))
    await asyncio.wait((reading,), timeout=rng.expovariate(1 / 2))
    done = reading.done()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return "answered before its client left" if done else "client left"


async def _read_all(session: "aiohttp.ClientSession", url: str, body: Any) -> bytes:
    async with session.post(url, json=body) as response:
        return await response.read()


async def wrong(
    session: "aiohttp.ClientSession", server: RunningServer, rng: random.Random, tally: Tally
) -> str:
    """Sends what can't be served; the answer is an error object with the right status."""
    endpoint, body, status = rng.choice(WRONG)
    async with session.post(server.url + PATHS[endpoint], json=body) as response:
        answer = await response.json()
    if response.status != status or not answer.get("error", {}).get("message"):
        tally.fault(f"{str(body)[:80]} was answered with {response.status}: {str(answer)[:200]}")
    return f"refused with {status}"


async def sampled(
    session: "aiohttp.ClientSession",
    server: RunningServer,
    rng: random.Random,
    kind: Kind,
    tally: Tally,
) -> str:
    """Not greedy, and with log-probabilities: only that there is an answer can be checked."""
    body = kind.body | {"temperature": 1.0, "seed": rng.randrange(99), "top_p": 0.9}
    body["logprobs"] = True if kind.endpoint == "chat" else 2
    async with session.post(server.url + PATHS[kind.endpoint], json=body) as response:
        answer = await response.json()
    if response.status != 200 or len(answer["choices"]) != len(kind.texts):
        tally.fault(f"a sampled request was answered with {response.status}: {answer}")
    return "sampled"


async def greedy(
    session: "aiohttp.ClientSession",
    server: RunningServer,
    rng: random.Random,
    kind: Kind,
    tally: Tally,
) -> str:
    """The text is the unloaded server's, streamed or not."""
    streams = rng.random() < 0.5
    body = {**kind.body, "stream": streams}
    async with session.post(server.url + PATHS[kind.endpoint], json=body) as response:
        data = await response.read()
    if response.status != 200:
        tally.fault(f"a right request was answered with {response.status}: {data[:200]!r}")
        return "refused"
    texts = streamed_texts(data) if streams else texts_of(json.loads(data))
    tally.num_compared += 1
    if texts != kind.texts:
        tally.fault(f"another text under load: {texts} instead of {kind.texts} of {kind.body}")
    return "greedy, streamed" if streams else "greedy"


def texts_of(answer: dict[str, Any]) -> tuple[str, ...]:
    """Of the choices of a whole answer."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return tuple(
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in choices
    )


def streamed_texts(data: bytes) -> tuple[str, ...]:
    """Of the choices of a streamed answer; () of one that has no proper end."""
    *lines, done, rest = data.decode().split("\n\n")
    if (done, rest) != ("data: [DONE]", ""):
        return ()
    texts: dict[int, str] = {}
    for line in lines:
        event = json.loads(line.removeprefix("data: "))
        for choice in event.get("choices", ()):
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    return tuple(text for _, text in sorted(texts.items()))


async def takes_every_block(
    session: "aiohttp.ClientSession", server: RunningServer, num_tokens: int
) -> bool:
    """A request that fills the KV cache to its last block: one that leaked would be missing."""
    body = {
        "prompt": [42 + number % 200 for number in range(num_tokens - BLOCK_SIZE)],
        "max_tokens": BLOCK_SIZE,
        "temperature": 0,
        "ignore_eos": True,
    }
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            async with session.post(server.url + PATHS["completions"], json=body) as response:
                answer = await response.json()
    except TimeoutError:
        return False
    used: bool = response.status == 200 and answer["usage"]["total_tokens"] == num_tokens
    return used


def memory_before_and_after(samples: Sequence[int]) -> tuple[float, float]:
    """Medians of the first samples after warm-up, and of the last ones of the load."""
    steady = samples[int(WARM_UP * len(samples)) :]
    share = max(1, len(steady) // 4)
    return median(steady[:share]), median(steady[-share:])


if __name__ == "__main__":
    main()
