"""A stage of a pipeline: a runner that receives hidden states, runs its layers, and sends them on.

::

    first stage    tokens ─► embedding ─► layers ─► send
    others                     receive ─► layers ─► send
    last stage                 receive ─► layers ─► head ─► sampler: a ``ModelRunner``'s step
                      ▲                                        │
                      └────────────── sampled tokens ──────────┘

Each stage has a step of its own (``runtime/turns.py`` says of whom). All get the same batches in
the same order, so each knows what comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.modeling.fed_tokens import FedStage, FeedingStage, write_first_tokens
from mini_infer.modeling.layers import Embedding, Layer
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.model_runner import ModelRunner
from mini_infer.modeling.profiling import step_range
from mini_infer.modeling.stage_graphs import StageGraphs
from mini_infer.modeling.step_graphs import GraphSet
from mini_infer.modeling.step_layout import StepLayout
from mini_infer.modeling.step_result import LocalStep, MaskedStep, device_failures
from mini_infer.modeling.weights import share_out_layers
from mini_infer.parallel.group import TensorParallelGroup
from mini_infer.parallel.pipeline import StageLink


class HiddenStates(Embedding):
    """In place of an embedding: what came from the stage before."""

    def __init__(self, received: Tensor) -> None:
        """``received [N, hidden]`` holds a step's tokens in their order."""
        nn.Module.__init__(self)
        self._received = received

    def forward(self, token_ids: Tensor) -> Tensor:
        """``[T] -> [T, hidden]``: a copy, which layers may overwrite."""
        return self._received[: len(token_ids)].clone()


class WatchedLayer(Layer):
    """Tells that its layer's turn has come."""

    def __init__(self, layer: nn.Module, on_progress: Callable[[], None]) -> None:
        super().__init__()
        self.layer, self._on_progress = layer, on_progress

    def forward(self, *arguments: Any) -> Tensor:
        """See ``DecoderLayer.forward``."""
        self._on_progress()
        x: Tensor = self.layer(*arguments)
        return x


def _nothing() -> None:
    """On a GPU steps are only launched, which takes no time."""


class StageRunner(ModelRunner):
    """The runner of a rank in one of several stages."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        group: TensorParallelGroup,
        link: StageLink,
        index: int,
        on_progress: Callable[[], None],
    ) -> None:
        """``group`` are the ranks of this stage, the one at ``index``; ``link`` is the way to its
        neighbours. On a CPU each step is told ``on_progress`` as often as the model has layers,
        whichever of them are here: others wait for it, and want to know that it does not hang."""
        super().__init__(config, files, group)
        self.stage = share_out_layers(config.model_config, config.pipeline_parallel_size)[index]
        self._here, self._link = self.stage, link
        self._on_progress = on_progress if config.device == "cpu" else _nothing
        self._stage_graphs: StageGraphs | None = None
        self._fed: FedStage | None = None
        self._feeds: FeedingStage | None = None
        self._unsampled: ScheduledBatch | None = None
        """A step that waits for its masks. They may never come, but the first stage waits for what
        it samples."""

    def load(self) -> None:
        """See ``ModelRunner.load``."""
        super().load()
        config = self.config
        self._hidden = torch.zeros(
            max(config.max_step_tokens, config.max_num_seqs),
            config.model_config.hidden_size,
            dtype=self.dtype,
            device=self.device,
        )
        if self.device.type == "cpu":
            watched = (WatchedLayer(layer, self._on_progress) for layer in self.model.layers)
            self.model.layers = nn.ModuleList(watched)
        if not self._here.is_first:
            self.model.embed_tokens = HiddenStates(self._hidden)
        if config.feeds_tokens_back and self._here.is_first:
            self._fed = FedStage(self.state, self._link, self._here.count)
        if config.feeds_tokens_back and self._here.is_last:
            self._feeds = FeedingStage(self.state, self._link)

    def capture_graphs(self) -> None:
        """See ``ModelRunner.capture_graphs``."""
        if self._here.is_last:
            super().capture_graphs()
        elif self.has_graphs:
            self._stage_graphs = self._layer_graphs()
            self._stage_graphs.capture()

    def new_graphs(self) -> GraphSet:
        """See ``ModelRunner.new_graphs``."""
        return super().new_graphs() if self._here.is_last else self._layer_graphs()

    def release(self) -> None:
        """See ``ModelRunner.release``."""
        self._stage_graphs = None
        super().release()

    def slowest(self, seconds: float) -> float:
        """See ``ModelRunner.slowest``."""
        return self._link.slowest(seconds)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> LocalStep | MaskedStep:
        """See ``ModelRunner.execute``. A step of a stage before the last brings nothing.

        Raises:
            CollectiveError: a neighbour is gone.
        """
        with device_failures():
            self._feed_unsampled()
            self._receive(batch)
            run = self._last_stages_step if self._here.is_last else self._other_stages_step
            step = run(batch)
            self._tell_progress(self.config.model_config.num_layers - len(self._here.layers))
            return step

    @torch.inference_mode()
    def drop(self, batch: ScheduledBatch) -> None:
        """In the last stage, in place of ``execute``: other stages do not know that the step is not
        to be run."""
        self._feed_unsampled()
        self._receive(batch)
        self._tell_progress(self.config.model_config.num_layers)
        self._feed(batch)

    def _other_stages_step(self, batch: ScheduledBatch) -> LocalStep | MaskedStep:
        with step_range(batch):
            if self._fed is not None:
                self._fed.take_in(batch)
            self.state.take_in(batch)
            if self._here.is_first:
                write_first_tokens(self.state, batch)
            self._link.send(self._run_layers(StepLayout.of(batch)))
            if self._fed is not None:
                self._fed.expect(batch)
            step = LocalStep(batch, self.state.params_by_slot, None, (), self.device)
            return MaskedStep(lambda masks: step) if batch.masked else step

    def _last_stages_step(self, batch: ScheduledBatch) -> LocalStep | MaskedStep:
        try:
            step = super().execute(batch)
        except BaseException:
            self._feed(batch)
            raise
        if not isinstance(step, MaskedStep):
            self._feed(batch)
            return step
        self._unsampled = batch

        @torch.inference_mode()
        def go_on(masks: bytearray) -> MaskedStep:
            try:
                step.sample(masks)
            finally:
                self._feed_unsampled()
            return step

        return MaskedStep(go_on)

    def _receive(self, batch: ScheduledBatch) -> None:
        if not self._here.is_first:
            self._link.receive_(self._hidden[: batch.num_tokens])

    def _tell_progress(self, num_layers: int) -> None:
        for _ in range(num_layers):
            self._on_progress()

    def _feed_unsampled(self) -> None:
        batch, self._unsampled = self._unsampled, None
        if batch is not None:
            self._feed(batch)

    def _feed(self, batch: ScheduledBatch) -> None:
        if self._feeds is not None:
            self._feeds.feed(batch)

    def _run_layers(self, layout: StepLayout) -> Tensor:
        """The residual stream ``[T, hidden]`` behind this stage's layers, which no later step
        overwrites."""
        graphs = self._stage_graphs
        if graphs is not None and (x := graphs.run(layout)) is not None:
            return x.clone()
        return self._forward(self.state.lay_out(layout), None)

    def _layer_graphs(self) -> StageGraphs:
        return StageGraphs.over(self.config, self.model, self.caches, self.state, self.dtype)
