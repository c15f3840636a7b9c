"""Pipeline parallelism: the model cut into stages along the axis ``pp``, run by the schedules that torch ships.

Shapes: B = batch, S = sequence, D = width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from forge_core.contracts.batch import bind
from forge_core.contracts.loss import Loss
from forge_core.contracts.parallel_pass import PassContext
from forge_core.errors import ConfigError, ForgeError
from forge_plugins_parallel.between_stages import BetweenStages, Form, along
from forge_plugins_parallel.compute_dtype import compute_dtype
from forge_plugins_parallel.config import PipelineConfig
from forge_plugins_parallel.context_parallel import position_dims
from forge_plugins_parallel.pipeline_cut import cut_model, held, part_of, shared_tensors
from forge_plugins_parallel.pipeline_stage import Stage, known
from forge_plugins_parallel.tied_head import TiedHead

Batch = Mapping[str, torch.Tensor]


class Pipeline:
    """Cuts the model into stages, of which each rank along ``pp`` holds one or several.

    The cut balances floating-point operations: the head counts its matrix, and all else what the model says
    (``TowerModel.flops_of``). If it says nothing, all blocks count the same, and the embedding nothing, since looking
    up multiplies nothing. Blocks that predict further tokens stay with the head (``MultiTokenModel``), and further
    parts are where the model has them (``TowerModel.stage_of``).
    """

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._width, self._words = 0, ""
        self._is_tied = False

    def split(self, model: Any, context: PassContext) -> tuple[Sequence[nn.Module], Sequence[str]]:
        """Same as ``SplitPass.split``.

        Raises:
            ConfigError: the model has no embedding or no head, has fewer blocks than there are stages, or shares a
                tensor between stages that is not the table of embedding and head.
            PluginError: what the model says of its further parts cannot be.
        """
        pp = context.mesh.degrees["pp"]
        if pp == 1:
            return [model], []
        for name in ("embed", "head"):
            if getattr(model, name) is None:
                raise ConfigError(f"parallel.pp: the model has no {name}, and is not cut into stages; set it to 1")
        n_stages = self._config.n_stages(pp)
        if self._config.splits_backward:  # what is compiled within a block, too, may not write into what forward saved
            functorch.donated_buffer = False
        cut = cut_model(model, n_stages, context.job.train.seq_len)
        borrowed = shared_tensors(model, cut, splits_backward=self._config.splits_backward)
        self._is_tied = bool(borrowed)
        self._width, self._words = model.head.weight.shape[1], type(model).__qualname__

        parts, touched = [], []
        for stage in self._stages_of(context.mesh.device_mesh):
            part: Any = part_of(model, cut, stage)
            part.borrowed = borrowed if stage == n_stages - 1 else {}
            parts.append(part)
            touched += held(model, cut, stage)
        return parts, touched

    def executor(self, parts: Sequence[nn.Module], loss: Loss, context: PassContext) -> PipelineExecutor:
        """Same as ``SplitPass.executor``."""
        ranks = context.mesh.degrees["cp"]
        between = BetweenStages(
            parts[0],
            words=self._words,
            width=self._width,
            dtype=compute_dtype(context.job.train.precision),
            sequence_parts=ranks,
            position_dims=position_dims(context.entries) if ranks > 1 else {},
        )
        by_stage = dict(zip(self._stages_of(context.mesh.device_mesh), parts, strict=True))
        group = context.mesh.device_mesh.get_group("pp")
        return PipelineExecutor(
            by_stage,
            loss,
            self._config,
            group=group,
            device=context.device,
            between=between,
            tied=self._tied_head(by_stage, group, context.device) if self._is_tied else None,
        )

    def _tied_head(self, parts: Mapping[int, nn.Module], group: dist.ProcessGroup, device: torch.device) -> TiedHead:
        rank_of = self._config.rank_of(group.size())
        last_stage = len(rank_of) - 1
        first, last = parts.get(0), parts.get(last_stage)
        table = None if first is None else dict(first.named_parameters())["embed.weight"]
        copied = None if last is None else dict(last.named_parameters())["head.weight"]
        held = table if table is not None else copied
        return TiedHead(
            table=table,
            copy=copied,
            group=group,
            first=rank_of[0],
            last=rank_of[last_stage],
            device=device,
            is_trained=held is not None and held.requires_grad,
        )

    def _stages_of(self, mesh: DeviceMesh) -> list[int]:
        """The stages of this rank, in the order in which a batch passes them."""
        return stages_of_rank(self._config, mesh["pp"].size(), mesh.get_local_rank("pp"))


def stages_of_rank(config: PipelineConfig, pp: int, rank: int) -> list[int]:
    """The stages of a rank along ``pp``, in the order in which a batch passes them."""
    return sorted(stage for stage, holder in config.rank_of(pp).items() if holder == rank)


class PipelineExecutor:
    """Runs a step's microbatches through the stages by one of torch's schedules.

    Every rank reads the same batches, so that only hidden states ``(B, S, D)`` and their gradients travel, with what a
    ``TravellingModel`` sends along: targets, positions and documents are already where they are needed.
    """

    binds_loss = True

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        loss: Loss,
        config: PipelineConfig,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        between: BetweenStages,
        tied: TiedHead | None = None,
    ) -> None:
        """
        Args:
            parts: of this rank, by stage, in the order in which a batch passes them.
            group: the ranks of this pipeline.
            between: knows what they send each other.
            tied: of a model whose head is tied to its embedding.
        """
        self._parts = parts
        self._loss = loss
        self._config = config
        self._group = group
        self._device = device
        self._between = between
        self._tied = tied
        self._rank_of = config.rank_of(group.size())
        self._n_stages = len(self._rank_of)
        self._schedule: Any = None
        self._stages: list[Stage] = []
        self._n_microbatches = 0
        self._scale: torch.Tensor | None = None
        self._sums: list[torch.Tensor] = []

    def run(self, microbatches: Sequence[Batch], scale: torch.Tensor) -> torch.Tensor:
        """Same as ``Executor.run``. Microbatches may differ in their shapes, and in what they have entries for."""
        forms = [self._between.forms(batch) for batch in microbatches]
        self._prepare(len(microbatches), forms[0])
        self._scale = scale
        self._sums.clear()
        if self._tied is not None:
            self._tied.bring_table()
        for stage in self._stages:
            stage.microbatches = microbatches
            stage.forms = forms
        try:
            # a target for each microbatch is what makes the schedule ask for its loss; stages have the batches
            self._schedule.step(target=torch.empty(len(microbatches)), return_outputs=False)
        except RuntimeError as error:
            if (reason := explained(error)) is not None:
                raise reason from None
            raise
        finally:
            for stage in self._stages:
                stage.microbatches = ()
        if self._tied is not None:
            self._tied.return_gradient()
        return torch.stack(self._sums).sum() if self._sums else torch.zeros((), device=self._device)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Same as ``Executor.evaluate``."""
        inputs, loss = bind(self._loss, batch)
        output = self._pass_down(self._between.forms(batch), inputs, loss=loss)
        if output is None:
            nothing = torch.zeros((), device=self._device)
            return nothing, nothing.long()
        return output.total, output.count

    @torch.no_grad()
    def predict(self, batch: Batch) -> torch.Tensor | None:
        """Same as ``PredictingExecutor.predict``."""
        inputs, _ = bind(self._loss, batch)
        logits: torch.Tensor | None = self._pass_down(self._between.forms(batch), inputs)
        return logits

    def _pass_down(self, forms: Mapping[str, Form], inputs: dict[str, Any], **options: Any) -> Any:
        """One batch down the stages, while earlier ranks already begin with the next; with a tied head they wait until
        the last one takes the table. Not by the schedule's ``eval``, which wants as many batches at once as a step has,
        all of one size.

        Args:
            forms: of what lies between stages.
            inputs: of forward.
            options: further arguments of the stages.

        Returns:
            The output of the last stage; ``None`` on ranks that do not have it.
        """
        if self._tied is not None:
            self._tied.bring_table()
        tokens = inputs.pop("tokens")
        given = [tokens]
        for stage, part in self._parts.items():
            if stage > 0 and stage - 1 not in self._parts:
                given = [torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in forms.values()]
                for one in given:
                    dist.recv(one, group=self._group, group_src=self._rank_of[stage - 1])
            first, *rest = given
            output = part(first, **inputs, **(along(forms, rest) if rest else {}), **known(part, tokens), **options)
            if stage == self._n_stages - 1:
                return output
            given = self._between.tensors(output, forms)
            if stage + 1 not in self._parts:
                for one in given:
                    dist.send(one.contiguous(), group=self._group, group_dst=self._rank_of[stage + 1])
        return None

    def _prepare(self, n_microbatches: int, forms: Mapping[str, Form]) -> None:
        """Build the schedule for steps of so many microbatches, unless it is there.

        Args:
            forms: of what lies between stages for a microbatch, for which there will be room from the start.
        """
        if self._n_microbatches == n_microbatches:
            return
        self._stages = [self._make_stage(stage, part, forms) for stage, part in self._parts.items()]
        own = self._config.own_schedule
        schedule: Any = _OwnSchedule if own else get_schedule_class(self._config.schedule)
        self._schedule = schedule(
            self._stages if issubclass(schedule, PipelineScheduleMulti) else self._stages[0],
            n_microbatches,
            loss_fn=self._take_loss,
            scale_grads=False,
        )
        if own is not None:
            rows = {rank: [_Action.from_str(str(one)) for one in row] for rank, row in enumerate(own.rows)}
            self._schedule._prepare_schedule_with_comms(rows)
        self._n_microbatches = n_microbatches

    def _make_stage(self, stage: int, part: nn.Module, forms: Mapping[str, Form]) -> Stage:
        """With the shapes at its ends given: to find them out, torch would run the model once more than we train."""
        with torch.device("meta"):
            tokens = torch.empty(next(iter(forms.values())).shape[:2], dtype=torch.int64)
            sent = tuple(torch.empty(form.shape, dtype=form.dtype, requires_grad=True) for form in forms.values())
            total = torch.empty((), requires_grad=True)
        made = Stage(
            part,
            stage,
            self._n_stages,
            self._device,
            input_args=tokens if stage == 0 else sent,
            output_args=total if stage == self._n_stages - 1 else sent,
            group=self._group,
        )
        made.loss, made.between = self._loss, self._between
        return made

    def _take_loss(self, total: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """What the last stage's backward starts from, once a microbatch; the targets have gone into forward."""
        assert self._scale is not None, "set at the start of each step"
        self._sums.append(total.detach())
        return total * self._scale


class _OwnSchedule(_PipelineScheduleRuntime):
    """torch keeps losses in the order of the last stage's forwards, and takes one by the number of its microbatch,
    which is that of another where the two orders differ. Here each is at its number."""

    def _maybe_compute_loss(self, stage: Any, output: Any, targets: Any, microbatch: int, *options: Any) -> None:
        super()._maybe_compute_loss(  # type: ignore[no-untyped-call]  # torch's
            stage, output, targets, microbatch, *options
        )
        if stage.is_last:
            losses = self._internal_losses
            loss = losses.pop()
            losses += [loss] * (self._n_microbatches - len(losses))
            losses[microbatch] = loss


def explained(error: RuntimeError) -> ForgeError | None:
    """Return what a stage has raised, which torch wraps, or a sentence where torch is too old; else nothing."""
    if isinstance(error.__cause__, ForgeError):
        return error.__cause__
    if "_input_metadata" in str(error):
        return ConfigError(
            f"parallel.passes.pipeline.schedule: torch {torch.__version__} cannot compute gradients of weights by "
            "themselves in a model with backward functions of its own; torch 2.13 can, or take 1F1B or Interleaved1F1B"
        )
    return None
