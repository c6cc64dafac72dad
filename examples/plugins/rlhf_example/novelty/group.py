"""Role group of `novelty`: the methods that an algorithm calls, without torch."""

from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.group import RoleGroup


class NoveltyGroup(RoleGroup):
    """All ranks of a service of role novelty, called as one."""

    def compute_novelty(self, batch: FutureBatch) -> FutureBatch:
        """Computes column novelty [rows] float32 from column response_ids: the mean of 1 / sqrt(1 + count) over the
        n-grams of a response, where count is how often earlier calls of the run had this n-gram."""
        return self.call("compute_novelty", batch)
