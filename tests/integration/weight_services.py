"""An actor and a rollout service, between which weights move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from controller.role_groups.cluster import Cluster
from controller.role_groups.roles import ActorGroup, RolloutGroup
from deploy.quickstart.build import make_tokenizer
from nccl_transfer.fetch import Fetcher
from nccl_transfer.registry import create_readers
from nccl_transfer.transports import host_id


def write_model(directory: Path, **keys: Any) -> None:
    """Writes a random model, whose vocabulary no mesh divides without padding, and the quickstart's tokenizer.

    Args:
        directory: Directory to write to.
        keys: Keys of the model's config.
    """
    torch.manual_seed(3)
    tokenizer: Any = make_tokenizer()
    config = LlamaConfig(
        vocab_size=131,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **keys,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


class WeightServices:
    """The two services as a controller in this process sees them.

    Args:
        cluster: Their cluster; `close` closes it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.fetcher = Fetcher(host_id(), create_readers())

    @property
    def actor(self) -> ActorGroup:
        group = self.cluster.group("actor")
        assert isinstance(group, ActorGroup)
        return group

    @property
    def rollout(self) -> RolloutGroup:
        group = self.cluster.group("rollout")
        assert isinstance(group, RolloutGroup)
        return group

    def close(self) -> None:
        self.fetcher.close()
        self.cluster.close()
