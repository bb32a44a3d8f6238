"""The policy's weights into the engine, and the order of it: wake the weights, announce, send in buckets, finish, wake
the KV cache; or abort: no engine serves half of an update. While the policy trains, the engine may give its memory up.
"""

from trainers import dist
from trainers.arithmetic import ConfigError
from trainers.config import GenerationConfig
from trainers.engines import Engine
from trainers.policy import Policy
from trainers.weights import WeightStream


class Refit:
    """Called with a version (the policy's step), it makes `engine` generate with the policy's present weights.

    Raises:
        ConfigError: release_memory, of an engine that cannot give any back.
    """

    def __init__(self, policy: Policy, engine: Engine, cfg: GenerationConfig):
        can = engine.capabilities()
        if cfg.release_memory and not can.can_sleep:
            raise ConfigError(
                f"policy.generation.release_memory=true has no effect with policy.generation.backend={cfg.backend} "
                "here: it has no memory that it could give back"
            )
        self.engine, self.release_memory = engine, cfg.release_memory
        self.stream = WeightStream(policy, can.transport, cfg.refit_bucket_mb * 2**20)

    def __call__(self, version: int) -> int:
        """Returns the bytes copied, on this rank. A failure on any rank is one on all."""
        return dist.together(lambda: self._send(version))[dist.rank()]

    def _send(self, version: int) -> int:
        manifest = self.stream.manifest()
        self.engine.wake("weights")
        self.engine.begin_update(version, manifest)
        buckets = iter(self.stream.buckets())
        try:
            moved = sum(self.engine.put(bucket) for bucket in buckets)
            self.engine.end_update()
        except BaseException as error:
            self.engine.abort_update()
            if isinstance(error, Exception):  # others take part in the gathering of what comes
                for _ in buckets:
                    pass
            raise
        self.engine.wake("kv")
        return moved

    def release(self) -> None:
        """After a step's rollouts: the engine's KV cache, weights of its own and the buffers of the way there are free
        until the next refit, if so configured."""
        if self.release_memory:
            self.engine.sleep()
            self.stream.free()


def refit(policy: Policy, engine: Engine, version: int) -> int:
    """One refit with the default settings; returns the bytes copied."""
    return Refit(policy, engine, GenerationConfig())(version)
