"""The published contracts on the engines of the installed example, as the author of a plug-in runs them; a test starts
pytest on this file where the example is installed."""

from services.testing.engines import EngineContract
from services.testing.rollouts import RolloutContract


class TestReplicated(EngineContract):
    keys = {"engine": "replicated"}


class TestPlain(RolloutContract):
    keys = {"rollout_engine": "plain"}
