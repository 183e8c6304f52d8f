"""Every engine option, once: the command line is generated from these fields and their text.

An ``EngineConfig`` is frozen and concrete. What a user may leave as ``auto`` is resolved before it
is built, by ``mini_infer.runtime.resolve.resolve_engine``.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.model_config import ModelConfig
from mini_infer.core.speculative_config import MAX_SPECULATING_ROWS, SpeculativeConfig

AUTO = "auto"
Dtype = Literal["float32", "float16", "bfloat16"]
Device = Literal["cpu", "cuda"]
LoadFormat = Literal["safetensors", "gguf", "dummy"]
AttentionBackend = Literal["torch", "triton", "flash_attn"]
ExecutorBackend = Literal["local", "mp", "ray"]
DEFAULT_MODEL = "smollm2-135m"
MAX_NUM_SEQS = 2**16
MAX_NUM_KV_BLOCKS = 2**24
"""Beyond these the bookkeeping alone takes gigabytes, and the system would kill the process."""
MAX_DEPTH = 16
"""Two steps in flight hide the host; each further one only makes an end by a stop token dearer."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    kind: type = str,
) -> Any:
    """A field that is an option. Default ``auto`` means that the resolver must decide."""
    metadata = {"help": help, "choices": choices, "kind": kind, "default": default}
    return field(default=MISSING if default == AUTO else default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """A concrete engine: which model, on what, how much memory, which mechanisms are on.

    Raises:
        InvalidConfigError: an option out of range, or two that contradict each other.
    """

    model: str = option(
        DEFAULT_MODEL, "Folder in Hugging Face format, .gguf file, hub id, or alias."
    )
    model_config: ModelConfig
    served_model_name: str = option(AUTO, "Name of the model in the API; by default --model's.")
    load_format: LoadFormat = option(
        AUTO,
        "Weights: safetensors, gguf, or dummy (seeded random weights from config.json).",
        choices=("safetensors", "gguf", "dummy"),
    )
    dtype: Dtype = option(
        AUTO,
        "Weights' dtype. On a CPU float16 means float16 weights and float32 arithmetic.",
        choices=("float32", "float16", "bfloat16"),
    )
    device: Device = option(AUTO, "Where the model runs.", choices=("cpu", "cuda"))
    attention_backend: AttentionBackend = option(
        AUTO,
        "Paged attention: triton (default on a GPU), flash_attn (where that package is installed), "
        "or torch (reference; the only one on a CPU).",
        choices=("torch", "triton", "flash_attn"),
    )
    max_model_len: int = option(
        AUTO, "Longest prompt plus output, in tokens; by default the model's.", kind=int
    )
    seed: int = option(0, "Seed of random weights and of unseeded requests.", kind=int)
    block_size: int = option(16, "Tokens per KV-cache block.", kind=int)
    kv_cache_memory: int | None = option(
        AUTO,
        "Memory for the KV cache, in bytes or as 2GiB, 512MiB; on a GPU by default all that "
        "--gpu-memory-utilization leaves.",
        kind=int,
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of a GPU's memory that weights, KV cache and all else may take.", kind=float
    )
    num_kv_blocks: int | None = option(
        None, "Number of KV-cache blocks, instead of --kv-cache-memory.", kind=int
    )
    max_num_seqs: int = option(AUTO, "Most requests that run in one step.", kind=int)
    max_num_batched_tokens: int = option(
        AUTO, "Token budget of one step: the chunk size of chunked prefill.", kind=int
    )
    enable_chunked_prefill: bool = option(
        True, "Split long prompts over steps, so that running requests go on.", kind=bool
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV of equal prompt prefixes.", kind=bool)
    scheduling_policy: str = option(
        "fcfs", "Who runs first, who is preempted: fcfs, priority, or your module:Class."
    )
    depth: int = option(
        AUTO,
        "Steps in flight; 2 schedules a step before the last one's result, and a pipeline needs "
        "one for each stage.",
        kind=int,
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        'Speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 4}. Methods: '
        "ngram, draft_model, early_exit, head, or your module:Class.",
        kind=SpeculativeConfig,
    )
    tensor_parallel_size: int = option(
        1, "Processes, on a GPU each, that the layers of the model are cut for.", kind=int
    )
    pipeline_parallel_size: int = option(
        1,
        "Stages that the layers of the model are shared out to, each of --tensor-parallel-size "
        "processes.",
        kind=int,
    )
    custom_all_reduce: bool = option(
        True,
        "Add up what tensor-parallel ranks have in one kernel, through memory that their GPUs "
        "share, if they do: all rows of two ranks, few of more. NCCL adds up the others.",
        kind=bool,
    )
    distributed_executor_backend: ExecutorBackend = option(
        AUTO,
        "Where steps run: local (in the engine's process; the default for one), mp (a process each "
        "on this host), or ray (on the hosts of a Ray cluster).",
        choices=("local", "mp", "ray"),
    )
    enforce_eager: bool = option(
        False,
        "Launch every kernel of a step anew, instead of replaying CUDA graphs; a CPU has none.",
        kind=bool,
    )
    dry_run: bool = option(
        False, "Invent tokens: the real server, scheduler and cache, no weights.", kind=bool
    )

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "block_size",
            "kv_cache_memory",
            "max_num_seqs",
            "max_num_batched_tokens",
            "depth",
            "tensor_parallel_size",
            "pipeline_parallel_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfigError(f"{name} must be 1 or more, got {value}")
        if self.max_model_len == 1:
            raise InvalidConfigError(
                "max_model_len must be 2 or more: a prompt has a token, and so has its answer"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, got "
                f"{self.gpu_memory_utilization}"
            )
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise InvalidConfigError(
                f"max_num_seqs must be at most {MAX_NUM_SEQS}, got {self.max_num_seqs}"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            size = getattr(self, name)
            if size > 1 and self.distributed_executor_backend == "local":
                raise InvalidConfigError(
                    f"a {name} of {size} needs as many processes: "
                    f"leave distributed_executor_backend at auto, or give mp or ray"
                )
        speculation, num_stages = self.speculative_config, self.pipeline_parallel_size
        if num_stages > 1 and speculation is not None and speculation.on_device:
            raise InvalidConfigError(
                f"speculative_config: {speculation.method} drafts where the model is, and with a "
                f"pipeline_parallel_size of {num_stages} no device has all of it: use ngram or a "
                f"class of yours on the host, or tensor_parallel_size in place of stages"
            )
        if self.depth > MAX_DEPTH:
            raise InvalidConfigError(f"depth must be at most {MAX_DEPTH}, got {self.depth}")
        if self.num_kv_blocks is not None and not 1 <= self.num_kv_blocks <= MAX_NUM_KV_BLOCKS:
            raise InvalidConfigError(
                f"num_kv_blocks must be between 1 and {MAX_NUM_KV_BLOCKS}, got "
                f"{self.num_kv_blocks}: give another number, a kv_cache_memory or a block_size "
                f"that makes such a number"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise InvalidConfigError(
                f"without chunked prefill a whole prompt must fit one step: raise "
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) to max_model_len "
                f"({self.max_model_len}) or lower max_model_len"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that run a step together, on a GPU each."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_pipelined(self) -> bool:
        """Do several stages share out the layers? Then each has a step of other requests."""
        return self.pipeline_parallel_size > 1

    @property
    def feeds_tokens_back(self) -> bool:
        """Does the last stage of a pipeline send the first one what it sampled? Then a request may
        be in a step whose first token the host does not know. Not with drafts: what becomes of them
        is for the host to say."""
        return self.is_pipelined and self.speculative_config is None

    @property
    def max_step_tokens(self) -> int:
        """Most tokens of one step. Without chunked prefill decodes and their drafts come on top of
        the budget, or a whole prompt could wait for ever beside them."""
        if self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        most = self.max_num_batched_tokens + self.max_num_seqs
        if self.speculative_config is not None:
            speculating = min(self.max_num_seqs, MAX_SPECULATING_ROWS)
            most += speculating * self.speculative_config.num_speculative_tokens
        return most

    @property
    def speculates_on_device(self) -> bool:
        """Are drafts proposed where the model runs?"""
        return self.speculative_config is not None and self.speculative_config.on_device

    @property
    def max_drafts_ahead(self) -> int:
        """Tokens beyond ``max_model_len`` that tables hold: drafts of a request at its end, which
        steps of uniform length can't leave out."""
        config = self.speculative_config
        return 0 if config is None else config.num_speculative_tokens + 1

    @property
    def max_blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)


def engine_options() -> dict[str, dict[str, Any]]:
    """Name to metadata (help, choices, kind, default) of every option, in declaration order."""
    return {item.name: dict(item.metadata) for item in fields(EngineConfig) if item.metadata}
