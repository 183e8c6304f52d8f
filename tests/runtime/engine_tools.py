"""Drives an engine in tests: to the end, checking the pool after every step."""

from collections.abc import Sequence

from mini_infer.core.outputs import RequestDelta, RequestOutput
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.executor import Executor
from tests.runtime.fake_executor import FakeExecutor, make_config


def fake_engine(**options: object) -> LLMEngine:
    config = make_config(**options)
    return LLMEngine(config, FakeExecutor(config), ByteTokenizer())


def engine_with(executor: Executor, **options: object) -> LLMEngine:
    return LLMEngine(make_config(**options), executor, ByteTokenizer())


def step(engine: LLMEngine) -> list[RequestDelta]:
    deltas = engine.step()
    engine.scheduler.cache.check_invariants()
    return deltas


def run(engine: LLMEngine, max_steps: int = 20_000) -> dict[str, RequestOutput]:
    """Steps until idle; fails instead of hanging."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished():
            assert engine.scheduler.cache.num_used_blocks == 0
            return outputs
        for delta in step(engine):
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
    raise AssertionError(f"not finished after {max_steps} steps")


def greedy(max_tokens: int = 8, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)  # type: ignore[arg-type]


def generate(
    engine: LLMEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    priorities: Sequence[int] | None = None,
    stream: bool = True,
) -> list[list[int]]:
    """Runs all prompts together; returns their output token ids."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for index, prompt in enumerate(prompts):
        priority = priorities[index] if priorities else 0
        engine.add_request(str(index), prompt, each[index], priority=priority, stream=stream)
    outputs = run(engine)
    return [outputs[str(index)].outputs[0].token_ids for index in range(len(prompts))]
