"""Role `novelty`: scores how rarely the n-grams of a response were seen before (docs/roles.md)."""

from rlhf.roles import RoleSpec

novelty = RoleSpec(
    name="novelty",
    service="rlhf_example.novelty.novelty_pb2:NoveltyService",
    table="rlhf_example.novelty.table:NoveltyTable",
    worker="rlhf_example.novelty.worker:NoveltyWorker",
    group="rlhf_example.novelty.group:NoveltyGroup",
    load_tested=("ComputeNovelty",),
)
