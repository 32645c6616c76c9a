"""Stage `sft`: a tokenizer and random weights, expert rollouts, supervised fine-tuning. Makes the base checkpoint."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from compaction.files import write_durably
from compaction.pairing import Pairing, pairing_of, read_pairing, write_pairing
from compaction.rollout import Rollout
from compaction.settings import AgentSettings, Settings
from compaction.summaries import load_prompt_pack
from evaluation.tasksets.trail import TrailSettings
from evaluation.tasksets.trail_expert import ExpertSettings
from rl.errors import UnsupportedModel, WorkerLost
from rl.rows import rows_of
from rl.settings import SampledBy, SFTSettings, TinySettings
from tasks.caching import StageSpec, describe_files
from tasks.cluster import Cluster
from tasks.expert_data import ExpertData, corpus, expert_rollouts
from tasks.provenance import trained_stage
from tasks.sft_data import Selection, TrajectoryData, select
from tasks.stages import Body, StageRun

STEPS_PER_REPORT = 20
SECONDS_PER_SIGN = 5.0
"""After which a long step is shown by itself"""


def _kind(entry: Any) -> str:
    """Which of the two an entry of `data` is: told apart by the key that only one of them has."""
    named = isinstance(entry, TrajectoryData) or (isinstance(entry, dict) and "trajectories" in entry)
    return "TrajectoryData" if named else "ExpertData"


SFTData = Annotated[
    Annotated[ExpertData, Tag("ExpertData")] | Annotated[TrajectoryData, Tag("TrajectoryData")], Discriminator(_kind)
]


class WarmstartSettings(Settings):
    """The embedded default's base policy: what it is, what it is shown, how it is trained."""

    model: str | None = Field(
        None, description="a pretrained model to start from: folder, or name on the hub; null = a new tiny one"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of weights and activations while fine-tuning")
    tiny: TinySettings = TinySettings()
    expert: ExpertSettings = ExpertSettings()
    corpus_tasks: int = Field(400, ge=1, description="tasks whose text trains the tokenizer")
    data: tuple[SFTData, ...] = Field(
        description="expert rollouts, or {trajectories: PATH}, one entry per SFT stage; none, with a pretrained model "
        "= no fine-tuning"
    )
    sft: SFTSettings = SFTSettings()
    checkpoint_every: int = Field(
        400, ge=STEPS_PER_REPORT, multiple_of=STEPS_PER_REPORT, description="steps between checkpoints"
    )

    @model_validator(mode="after")
    def _one_data_set_per_stage(self) -> WarmstartSettings:
        if not self.data and self.model is None:
            raise ValueError(
                "data is empty: a new model has to learn the world's rules; only a pretrained one may act as it is"
            )
        if self.data and len(self.data) != len(self.sft.stages):
            raise ValueError(
                f"data has {len(self.data)} entries for {len(self.sft.stages)} SFT stages; give one per stage"
            )
        return self

    @property
    def trajectories(self) -> tuple[TrajectoryData, ...]:
        """The entries that are read instead of made."""
        return tuple(data for data in self.data if isinstance(data, TrajectoryData))

    @property
    def reads_collected(self) -> bool:
        """Whether stage `collect` comes first."""
        return any(data.collected for data in self.trajectories)

    @property
    def longest_window(self) -> int:
        """Of the expert's rollouts; trajectories fit the agent's own window."""
        return max((w for data in self.data if isinstance(data, ExpertData) for w in data.windows), default=0)


SOURCES = (
    "compaction",
    "evaluation/harbor_results.py",
    "evaluation/paths.py",
    "evaluation/tasksets",
    "evaluation/environments",
    "rl/batching.py",
    "rl/checkpoint.py",
    "rl/engines/model_types.py",
    "rl/logprobs.py",
    "rl/lora.py",
    "rl/master_weights.py",
    "rl/models.py",
    "rl/optimization.py",
    "rl/packing.py",
    "rl/pretrained.py",
    "rl/rows.py",
    "rl/settings.py",
    "rl/sft.py",
    "rl/tiny.py",
    "tasks/expert_data.py",
    "tasks/sft_data.py",
    "tasks/warmstart.py",
)
SELECTED = "data.json"
"""What became of the trajectories of `sft.data`"""
CHECKPOINTS = "checkpoints"
STATE = "sft.pt"


def spec(
    settings: WarmstartSettings,
    world: TrailSettings,
    agent: AgentSettings,
    seed: int,
    collected: StageSpec | None = None,
) -> StageSpec:
    """The stage's name by content. `collected`: the stage whose trajectories it reads. Raises UserError."""
    return StageSpec(
        stage="sft",
        label=f"seed {seed}",
        settings={
            "warmstart": settings.model_dump(mode="json", exclude={"checkpoint_every", "model", "data"})
            | {"data": [data.identity() for data in settings.data]},
            "model": model_identity(settings.model),
            "world": world.model_dump(mode="json"),
            "agent": agent.model_dump(mode="json"),
            "prompts": load_prompt_pack(agent.compaction.prompt_pack).model_dump(),
            "seed": seed,
        },
        parents={} if collected is None else {"trajectories": collected.digest},
        packages=SOURCES,
    )


@cache
def model_identity(model: str | None) -> str | dict[str, Any] | None:
    """A pretrained model by content, so that other weights in the same folder are another start; by name on the hub."""
    if model is None or not Path(model).expanduser().is_dir():
        return model
    return {name: file["digest"] for name, file in describe_files(Path(model).expanduser()).items()}


def body(
    settings: WarmstartSettings,
    world: TrailSettings,
    agent: AgentSettings,
    seed: int,
    cluster: Cluster,
    *,
    collected: Path | None = None,
    engine: SampledBy = "torch",
    gpus: float = 0.0,
) -> Body:
    """Trains in a worker process and streams the metrics here. `collected`: what stage `collect` made; `engine`: what
    will sample from the model, which is refused before it is trained where that could not; `gpus`: what it claims."""

    async def run(stage: StageRun) -> dict[str, Any]:
        cluster.ensure()
        import ray

        from rl.pretrained import local_model
        from rl.remote import PROCESS_DIED, result_of, seated

        if settings.model is not None and local_model(settings.model) is None:
            stage.note(f"{settings.model} comes from the Hugging Face hub; the first time this takes a while")

        @ray.remote(num_cpus=0, max_retries=0, max_calls=1)  # its memory is given back at once
        def train() -> Iterator[tuple[int, dict[str, float] | None]]:
            from rl.remote import one_thread

            one_thread()
            yield from _reports(warmstart(stage_folder, settings, world, agent, seed, collected, engine))

        stage_folder = stage.folder
        last: dict[str, float] = {}
        data: list[dict[str, Any]] = []
        try:
            async with seated([gpus]) as (seat,):
                async for reference in train.options(num_returns="streaming", **seat.options()).remote():
                    done, metrics = await result_of(reference)
                    if not data and (data := _selected(stage_folder)):
                        for entry in data:
                            stage.note(entry["text"])
                    if metrics is None:
                        stage.progress.update(done)
                        continue
                    last = metrics
                    stage.log(done, last, {"loss": last["sft/loss"]})
        except PROCESS_DIED as error:
            raise WorkerLost(f"the fine-tuning process died ({type(error).__name__})") from error
        made = {"checkpoint": "checkpoint", "base_model": settings.model, "loss": last.get("sft/loss")}
        return made | ({"data": data} if data else {})

    return run


def _selected(folder: Path) -> list[dict[str, Any]]:
    """What became of the trajectories of each entry of `data`; none where the expert made them all."""
    path = folder / SELECTED
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


def _reports(steps: Iterator[tuple[int, dict[str, float]]]) -> Iterator[tuple[int, dict[str, float] | None]]:
    """(steps done, mean metrics since the last report); None in between, where steps take long."""
    pending: list[dict[str, float]] = []
    done, told = 0, time.monotonic()
    for done, metrics in steps:
        pending.append(metrics)
        if len(pending) == STEPS_PER_REPORT:
            yield done, _mean(pending)
            pending = []
        elif time.monotonic() - told > SECONDS_PER_SIGN:
            yield done, None
        else:
            continue
        told = time.monotonic()
    if pending:
        yield done, _mean(pending)


def _mean(metrics: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}


def warmstart(
    folder: Path,
    settings: WarmstartSettings,
    world: TrailSettings,
    agent: AgentSettings,
    seed: int,
    collected: Path | None = None,
    engine: SampledBy = "torch",
) -> Iterator[tuple[int, dict[str, float]]]:
    """Makes `folder/checkpoint`; yields (steps done, metrics of the step). Needs torch, so it runs in a worker process.

    Goes on from the last checkpoint in `folder`. Raises CheckpointError where one cannot be read or written, and
    UserError where an entry's trajectories cannot be trained on.
    """
    import torch

    from compaction.rendering import load_renderer
    from rl.lora import add_adapters
    from rl.models import chosen_device, load_policy
    from rl.sft import run_sft, sft_optimizer

    start = _start(folder, settings, world, agent, seed, engine)
    renderer = load_renderer(start)
    if settings.data and renderer.with_thinking(agent.thinking).opens_thinking:
        raise UnsupportedModel(
            f"{settings.model}: its chat template opens every reply with thinking, and what it is to be fine-tuned on "
            "holds none; set agent.thinking=false"
        )
    selections: list[Selection] = []

    def rollouts(stage: int, data: ExpertData | TrajectoryData) -> list[Rollout]:
        if isinstance(data, ExpertData):
            return expert_rollouts(data, settings.expert, world, agent, renderer, seed, stage)
        path = collected if data.collected and collected is not None else Path(data.trajectories)
        selections.append(select(data, path, renderer, agent))
        return selections[-1].rollouts

    rows = [[row for r in rollouts(stage, data) for row in rows_of(r)] for stage, data in enumerate(settings.data)]
    if selections:
        told = [{"text": selection.text(), **selection.summary()} for selection in selections]
        write_durably(folder / SELECTED, json.dumps(told, indent=1))
    policy = load_policy(start, getattr(torch, settings.dtype)).to(chosen_device())
    if not settings.data:
        _save(policy, folder / "checkpoint", start, read_pairing(start))
        return
    if settings.sft.lora is not None:
        add_adapters(policy, policy.get_decoder(), settings.sft.lora)
    optimizer = sft_optimizer(policy, settings.sft)
    root, total = folder / CHECKPOINTS, sum(stage.steps for stage in settings.sft.stages)
    first = _resume(root, policy, optimizer)
    steps = run_sft(policy, rows, settings.sft, seed=seed, optimizer=optimizer, first_step=first)
    for done, metrics in enumerate(steps, first + 1):
        yield done, metrics
        if done % settings.checkpoint_every == 0 and done < total:
            _checkpoint(root, done, policy, optimizer)
    _save(policy, folder / "checkpoint", start, _pairing(settings, agent, seed, start))
    shutil.rmtree(root, ignore_errors=True)


def _save(policy: Any, folder: Path, start: Path, pairing: Pairing | None) -> None:
    from rl.models import save_policy

    save_policy(policy, folder, start)
    if pairing is not None:
        write_pairing(folder, pairing)


def _pairing(settings: WarmstartSettings, agent: AgentSettings, seed: int, start: Path) -> Pairing:
    """The pairing of the fine-tuned policy; what its base model was trained on comes first."""
    before = read_pairing(start)
    data = ", ".join(data.described() for data in settings.data)
    steps = sum(stage.steps for stage in settings.sft.stages)
    own = trained_stage("sft", data, steps, seed, settings.sft.model_dump(mode="json"))
    return pairing_of(agent, settings.model, [*(before.training if before else ()), own])


def _start(
    folder: Path, settings: WarmstartSettings, world: TrailSettings, agent: AgentSettings, seed: int, engine: SampledBy
) -> Path:
    """The checkpoint folder that fine-tuning starts from."""
    if settings.model is None:
        from rl.tiny import make_tiny_checkpoint

        tiny = settings.tiny.model_copy(update={"seed": seed})
        return make_tiny_checkpoint(folder / "initial", corpus(settings.corpus_tasks, world, agent), tiny)
    from rl.pretrained import check_trainable, find_model

    found = find_model(settings.model)
    longest = max(agent.compaction.window, settings.longest_window)
    check_trainable(found, longest, engine)
    return found


def _checkpoint(root: Path, step: int, policy: Any, optimizer: Any) -> None:
    import torch

    from rl.checkpoint import new_checkpoint
    from rl.lora import learned_weights

    with new_checkpoint(root, step, {}) as folder:
        try:
            torch.save({"policy": learned_weights(policy), "optimizer": optimizer.state()}, folder / STATE)
        except RuntimeError as error:  # what torch raises where a write fails
            raise OSError(str(error)) from error


def _resume(root: Path, policy: Any, optimizer: Any) -> int:
    """Steps done by the newest checkpoint, whose state policy and optimiser then have; 0 where there is none."""
    import torch

    from rl.checkpoint import latest_checkpoint, load_checkpoint
    from rl.lora import load_learned_weights

    folder = latest_checkpoint(root)
    if folder is None:
        return 0
    step = load_checkpoint(folder).step
    state = torch.load(folder / STATE, weights_only=True)
    load_learned_weights(policy, state["policy"])
    optimizer.restore(state["optimizer"])
    return step
