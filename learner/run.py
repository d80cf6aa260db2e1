"""Runs a learner: checks the settings, loads the model, runs the loop, and ends on a signal."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import set_seed
from transformers.utils import logging as transformers_logging

from slipstream.learner import loop, start
from slipstream.learner.callbacks import load as load_callbacks
from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.checkpoints import resuming, uploads
from slipstream.learner.checkpoints.checkpoint import Checkpoint
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Scoring
from slipstream.learner.model.precision import find_rounding_warning
from slipstream.learner.model.reference import load_reference
from slipstream.learner.ranks import environment, launch, wrapping
from slipstream.learner.ranks.environment import RankInfo
from slipstream.learner.ranks.stopping import SIGNALS, Stop, Stopped
from slipstream.learner.ranks.team import Team
from slipstream.learner.report import trackers
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.report.queue_status import Watch
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol import checkpoints as places
from slipstream.protocol import tracing
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import ConfigError, RunConfig, adapter_checks, checks
from slipstream.protocol.config.checks import find_algorithm_warnings
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.ranks.channel import StoreChannel
from slipstream.weight_sync.ranks.follower import ShareFollower
from slipstream.weight_sync.ranks.leader import FollowingRanks
from slipstream.weight_sync.weights import snapshot


def run(config: RunConfig, queue_url: str | None = None, resume: bool = False, take_over: bool = False) -> None:
    """Train `config.learner.steps` steps.

    Args:
        take_over: Whether a resume may end another learner of this run that lives.

    Raises:
        ConfigError: Before anything is changed.
        SystemExit: With 130 or 143 after Ctrl-C or SIGTERM.
    """
    ignored = environment.check_environment(os.environ)
    environment.clear(os.environ)
    place = launch.this_rank(config)
    if place.rank > 0:
        follow(place)
        return
    config = start.with_served_dtype(launch.with_world_size(config, place), torch.cuda.is_available())
    if config.learner.epochs is not None:
        raise ConfigError(
            f"learner.epochs = {config.learner.epochs:g}: this learner does not load the data set, and so cannot count "
            f"its rows; start it with: slipstream learner run.toml, or give learner.steps"
        )
    trackers.wanted_trackers(config.tracking)
    uploads.require(config.hub)
    callbacks = load_callbacks(config.learner.callbacks)
    # The progress bar of each checkpoint would run through the live line.
    transformers_logging.disable_progress_bar()
    url = queue_url or config.queue.address
    accepted = config.rollout.accept_sampler_mismatch
    progress = TerminalProgress(config.learner.steps, config.learner.groups_per_step, show_sampler_kl=accepted)
    with (
        tracing.sending(config.tracking.traces, "learner", config.run.name),
        Stop(config.deploy.grace_s) as stop,
        BlockingQueueClient(QueueClient(url, config.token_for("learner"))) as client,
        progress,
        Watch(client, progress) as watch,
        ExitStack() as ranks,
    ):
        checkpoint, after = None if resume else start.starting_point(config, resume), None
        try:
            if resume:
                resuming.check_adapter(config, resume)
                with progress.phase("waiting for the queue"):
                    position = client.call(lambda queue: queue.position())
                start.check_alone(position, take_over)
                after = None if take_over else position.session
                checkpoint = start.starting_point(config, resume, position, progress.warn)
                if checkpoint is not None and start.is_over(config, checkpoint, position):
                    progress.say(places.nothing_to_do(config.run.name, checkpoint.info.step, config.learner.steps))
                    return
                for line in start.introduction(config, checkpoint, position):
                    progress.say(line)
            progress.say(start.algorithm(config.learner))
            findings = [
                *find_algorithm_warnings(config.learner),
                *adapter_checks.find_adapter_warnings(config.learner, config.lora),
            ]
            for finding in [*findings, *checks.find_quorum_warnings(config.weight_sync, config.vllm)]:
                progress.warn(str(finding))
            for variable in ignored:
                progress.warn(variable)
            if place.count > 1:
                progress.say(f"{place.count} ranks share each step")
            elif config.learner.shard_weights:
                progress.warn(
                    "learner.shard_weights = true does nothing with one rank: set learner.ranks, or leave it out"
                )
            with progress.phase(f"loading the model {config.model.path}"):
                team = ranks.enter_context(launch.lead_team(config, place, stop, progress.warn))
                trainer = build_trainer(config, checkpoint, team)
            policy = trainer.policy
            if policy.layout_note:
                progress.say(policy.layout_note)
            by_shares = sends_shares(config, team)
            if by_shares or not team.sharded:
                snapshot.expect(trainer.share() if by_shares else policy.named_weights(), policy.precision.servers)
            if policy.adapter is not None:
                progress.say(f"lora.r = {config.lora.r}: {policy.adapter.trained:,} weights train, of an adapter")
            weights = partial(wrapping.own_weights, policy) if team.sharded else trainer.weights
            if text := find_rounding_warning(policy.precision, weights, config.learner.learning_rate):
                progress.warn(text)
        except Stopped:
            progress.say(f"stopped before it began; start it again with: {start.command()}", whole=True)
            raise
        followers = following_ranks(config, team)
        with Publisher(config, url, ranks=followers) as publisher:
            loop.train(config, trainer, client, publisher, progress, stop, checkpoint, resume, callbacks, after, watch)


def follow(place: RankInfo) -> None:
    """Run a rank other than the first: follows rank 0 until there is nothing left to do. Raises `RankLost`."""
    for number in SIGNALS:  # Signals go to all ranks; rank 0 decides what follows.
        signal.signal(number, signal.SIG_IGN)
    transformers_logging.disable_progress_bar()
    team, config = launch.join_team(place)
    trainer = build_trainer(config, None, team)
    channel = StoreChannel(team.connect_store(), team.connect_store(), team.rank, leads=False)
    if sends_shares(config, team):
        snapshot.expect(trainer.share(), trainer.policy.precision.servers)
    with ShareFollower(config, channel, team.rank, beside_rank_0=place.rank == place.local_rank) as follower:
        trainer.on_share = follower.fill
        trainer.take_part()
    launch.leave_group()


def sends_shares(config: RunConfig, team: Team) -> bool:
    """Return whether each rank sends its share of the weights, and not rank 0 everything."""
    # The in-place engine takes one sender, and a server shares a GPU with one rank.
    return team.count > 1 and config.weight_sync.transport not in ("nccl", "ipc")


def following_ranks(config: RunConfig, team: Team) -> FollowingRanks | None:
    """Connect to the other ranks where each sends its share of the weights; None where rank 0 sends everything."""
    if not sends_shares(config, team):
        return None
    return FollowingRanks(
        [StoreChannel(team.connect_store(), team.connect_store(), rank, leads=True) for rank in range(1, team.count)]
    )


# Set by the supervisor where servers share the learner's GPU: the share of its memory that the learner may take.
GPU_SHARE = "SLIPSTREAM_GPU_SHARE"


def bound_gpu_memory() -> None:
    """Keep this process within its share of the GPU: a batch that takes more fails here, and not a server's."""
    share = float(os.environ.get(GPU_SHARE) or 0)
    if share and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


def build_trainer(config: RunConfig, checkpoint: Checkpoint | None, team: Team | None = None) -> PolicyTrainer:
    """Build the trainer with the weights of `checkpoint`, or the model's own; rank 0's on all ranks. Where each holds a
    part, it reads that part; unless rank 0 sees a checkpoint that another does not, and sends it."""
    set_seed(config.run.seed)
    bound_gpu_memory()
    team = team or Team()
    with team.waiting():
        return _built(config, checkpoint, team)


def _built(config: RunConfig, checkpoint: Checkpoint | None, team: Team) -> PolicyTrainer:
    learner, adapted = config.learner, config.lora.r > 0
    if checkpoint is not None:
        checkpoints.check_kind(checkpoint, adapted)
    # A checkpoint's model has the adapter in it; the base is the model's own.
    path = config.model.path if checkpoint is None or adapted else str(checkpoint.model_path)
    scoring = Scoring(
        config.rollout.temperature, learner.logits_mib, learner.router_aux_loss_coef > 0, learner.router_replay
    )
    by_part = team.sharded
    if team.sharded:
        of_rank_0 = team.spread(path)
        by_part = team.agree(of_rank_0 == config.model.path or Path(of_rank_0).is_dir())
        path = of_rank_0 if by_part else path
    policy = load_policy(
        path,
        config.model,
        scoring,
        learner,
        longest=config.vllm.max_model_len,
        lora=config.lora,
        team=team if by_part else None,
        images=config.images.enabled,
    )
    if checkpoint is not None and policy.adapter is not None:
        policy.adapter.load(checkpoint.adapter_path)
    reference = load_reference(config, scoring, policy, team)
    trainer = PolicyTrainer(policy, learner, config.rollout.max_episode_tokens, reference, team, config.teacher.coef)
    if checkpoint is not None:
        checkpoints.restore(checkpoint, trainer)
    return trainer
