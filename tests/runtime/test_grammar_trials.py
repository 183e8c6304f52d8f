"""Forms that crash a compiler, or that it never gets done with, cost a process and nothing else."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from mini_infer.core.errors import InvalidRequestError, UnavailableError
from mini_infer.core.structured_outputs import StructuredOutputsParams as Params
from mini_infer.runtime import grammar_compiler
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.grammar_compiler import GrammarCompiler
from mini_infer.runtime.grammar_trials import GrammarTrials
from tests.runtime.fake_executor import make_config
from tests.serving.live import wait_for

ENDLESS: dict[str, Any] = {
    "json": {"allOf": [{"type": "string", "pattern": f".*a{number}.*"} for number in range(60)]}
}
"""llguidance intersects the patterns for minutes, and its budget does not count that."""
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(8000)) + '\nr8000: "y"'


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    made = GrammarTrials(make_config(), ByteTokenizer())
    yield made
    made.close()


def processes(trials: GrammarTrials) -> list[int]:
    return [trial._process.pid for trial in trials._all]


def test_a_chain_of_references_finds_stack_enough() -> None:
    """It ended the process with a segmentation fault."""
    params = Params(grammar=CHAIN)
    grammars = GrammarCompiler(make_config(), ByteTokenizer())
    size = threading.stack_size()
    grammars.check(params)
    assert threading.stack_size() == size
    grammar = grammars.grammar(grammars.start(params).result(), ignore_eos=False)
    assert grammar.accept(ord("y")) is None
    assert grammar.complete


async def test_verdicts_are_those_of_the_compiler(trials: GrammarTrials) -> None:
    await trials.compiled(Params(regex="a+"))
    await trials.compiled(Params(grammar=CHAIN))
    schema = {"properties": {"a": {"not": {}}}}
    grammars = GrammarCompiler(make_config(), ByteTokenizer())
    told = []
    for checker in (trials, grammars):
        with pytest.raises(InvalidRequestError) as raised:
            checker.check(Params(json=schema))
        told.append((str(raised.value), raised.value.param))
    assert told[0] == told[1]
    assert "['properties']['a']" in told[0][0]
    assert len(processes(trials)) == 1


def test_one_that_never_ends_is_ended(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.check(Params(regex="a"))
    [first] = processes(trials)
    monkeypatch.setattr(grammar_compiler, "COMPILE_SECONDS", 0.05)
    with pytest.raises(InvalidRequestError, match=r"json is too complex: it took longer"):
        trials.check(Params(**ENDLESS))
    assert not psutil.pid_exists(first)
    monkeypatch.undo()
    trials.check(Params(regex="b"))
    assert processes(trials) != [first]


def test_one_that_crashes_is_refused_and_the_next_is_not(trials: GrammarTrials) -> None:
    trials.check(Params(regex="a"))
    [first] = processes(trials)
    future = trials.start(Params(**ENDLESS))
    process = psutil.Process(first)
    ended = process.cpu_times().user
    wait_for(lambda: process.cpu_times().user > ended)  # it compiles
    process.kill()
    with pytest.raises(InvalidRequestError, match="its compiler gave up"):
        future.result()
    trials.check(Params(regex="b"))
    [trial] = trials._all
    psutil.Process(trial._process.pid).kill()  # while it has nothing to do
    wait_for(lambda: not trial.is_alive)
    trials.check(Params(regex="c"))


def test_its_end_is_not_held_up(trials: GrammarTrials) -> None:
    trials.check(Params(regex="a"))
    futures = [trials.start(Params(**ENDLESS)), trials.start(Params(regex="a" * 2))]
    pids = processes(trials)
    trials.close()
    trials.close()
    with pytest.raises(InvalidRequestError):
        futures[0].result()
    assert not any(map(psutil.pid_exists, pids))


async def test_as_many_wait_as_are_kept(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that hang up leave their forms behind."""
    begun: list[Any] = []
    go_on = threading.Event()

    def compile_slowly(spec: Any) -> None:
        begun.append(spec)
        go_on.wait(30)

    monkeypatch.setattr(trials, "_compile", compile_slowly)
    monkeypatch.setattr(grammar_compiler, "CACHED_GRAMMARS", 3)
    forms = [Params(regex="a" * number) for number in range(1, 11)]
    waiting = [asyncio.create_task(trials.compiled(form)) for form in forms[:2]]
    await asyncio.sleep(0)
    wait_for(lambda: len(begun) == 2)
    waiting += [asyncio.create_task(trials.compiled(form)) for form in forms[2:]]
    await asyncio.sleep(0)
    go_on.set()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    num_refused = sum(isinstance(end, UnavailableError) for end in ends)
    assert num_refused == 5, "two were begun, three are kept"
    assert ends.count(None) == 5
    await trials.compiled(forms[4])
