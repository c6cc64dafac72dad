"""Positions of ranks in the training mesh p-t-d, and in the generation mesh pg-tg-dg-d of the same ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mesh:
    """A training mesh p-t-d and, on the same ranks, a generation mesh pg-tg-dg-d with dg = p t / (pg tg)
    (HybridFlow, section 5).

    A generation shard is the union of p/pg by t/tg training shards, those of a micro-DP group. The ranks of a
    generation replica are contiguous, tensor ranks innermost, as inference engines require; where the two meshes are
    equal this is the usual order of Megatron: tensor index r % t, stage r // t % p.

    Ranks without model parallelism in training (p = 1, and t is the size of the sequence-parallel groups) may generate
    on any pg and tg whose product divides t d, in the usual order.

    Args:
        pipeline, tensor, data: Sizes p, t and d of the training mesh. Default: 1.
        generation_pipeline, generation_tensor: Sizes pg and tg of the generation mesh. 0, the default, is replaced
            by p or t, respectively.
        usual_order: Numbers the training ranks in the usual order whatever the generation mesh is, so that shards
            do not nest (HybridFlow-V, section 5.4). `micro_data` and `micro_data_group` are undefined then.

    Raises:
        ConfigError: A size is below 1, or pg does not divide p, or tg does not divide t, where data ranks cannot form
            the generation replicas either.
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    generation_pipeline: int = 0
    generation_tensor: int = 0
    usual_order: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, whole in (("pipeline", self.pipeline), ("tensor", self.tensor), ("data", self.data)):
            if whole < 1:
                raise ConfigError(f"mesh: the {name} size must be at least 1 (given: {whole})")
        object.__setattr__(self, "generation_pipeline", self.generation_pipeline or self.pipeline)
        object.__setattr__(self, "generation_tensor", self.generation_tensor or self.tensor)
        if self.usual_order and self.pipeline == 1 and self.size % self.replica_size == 0:
            return
        for name, part, whole in (
            ("pipeline", self.generation_pipeline, self.pipeline),
            ("tensor", self.generation_tensor, self.tensor),
        ):
            if part < 1 or whole % part:
                allowed = [size for size in range(1, whole + 1) if whole % size == 0]
                raise ConfigError(
                    f"mesh: the generation {name} size must divide the training one, {whole} (given: {part}; "
                    f"allowed: {', '.join(map(str, allowed))})"
                )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.tensor * self.data

    @property
    def micro_data(self) -> int:
        """dg = p t / (pg tg): generation replicas per training replica, which is also the size of a micro-DP
        group."""
        return self.pipeline * self.tensor // self.replica_size

    @property
    def replicas(self) -> int:
        """Number of generation replicas: dg d where shards nest."""
        return self.size // self.replica_size

    @property
    def replica_size(self) -> int:
        """Number of ranks per generation replica, pg tg."""
        return self.generation_pipeline * self.generation_tensor

    def position(self, rank: int) -> tuple[int, int, int]:
        """Returns (pipeline stage, tensor index, data index) of `rank` in the training mesh."""
        if self.usual_order:
            data, within = divmod(rank, self.pipeline * self.tensor)
            return *divmod(within, self.tensor), data
        g_p, g_t, replica = self.generation_position(rank)
        data, within = divmod(replica, self.micro_data)
        i_p, i_t = divmod(within, self.tensor_ratio)
        return g_p * self.pipeline_ratio + i_p, g_t * self.tensor_ratio + i_t, data

    def rank(self, pipeline: int, tensor: int, data: int) -> int:
        """Returns the rank at a position of the training mesh, the inverse of `position`."""
        if self.usual_order:
            return (data * self.pipeline + pipeline) * self.tensor + tensor
        g_p, i_p = divmod(pipeline, self.pipeline_ratio)
        g_t, i_t = divmod(tensor, self.tensor_ratio)
        replica = (data * self.pipeline_ratio + i_p) * self.tensor_ratio + i_t
        return (replica * self.generation_pipeline + g_p) * self.generation_tensor + g_t

    def generation_position(self, rank: int) -> tuple[int, int, int]:
        """Returns (pipeline stage, tensor index, replica) of `rank` in the generation mesh."""
        replica, within = divmod(rank, self.replica_size)
        return *divmod(within, self.generation_tensor), replica

    def micro_data_group(self, rank: int) -> list[int]:
        """Returns the micro-DP group of `rank`, in ascending order: the ranks whose training shards make up its
        generation shard, and which all-gather the weights for generation."""
        within = rank % self.replica_size
        first = rank // (self.micro_data * self.replica_size) * self.micro_data
        return [(first + replica) * self.replica_size + within for replica in range(self.micro_data)]

    @property
    def pipeline_ratio(self) -> int:
        """p / pg: training stages per generation stage."""
        return self.pipeline // self.generation_pipeline

    @property
    def tensor_ratio(self) -> int:
        """t / tg: training tensor shards per generation tensor shard."""
        return self.tensor // self.generation_tensor

    def __str__(self) -> str:
        training = f"{self.pipeline}-{self.tensor}-{self.data}"
        if (self.generation_pipeline, self.generation_tensor) == (self.pipeline, self.tensor):
            return training
        nests = self.micro_data * self.data == self.replicas
        dealt = f"{self.micro_data}-{self.data}" if nests else f"{self.replicas}"
        generation = f"{self.generation_pipeline}-{self.generation_tensor}-{dealt}"
        return f"{training} / {generation}" + (", usual order" if self.usual_order else "")
