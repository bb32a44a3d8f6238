"""A critic that a server has on a GPU: bfloat16 beside float32 masters, saved, killed, and taken up again."""

import pytest

from tests.served import ServerProcess
from tests.test_remote_value import lines, run, small
from trainers.value.remote import RemoteValue

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ON_GPU = {"cluster__device": "cuda", "policy__dtype": "bfloat16"}


def test_a_served_critic_is_the_local_one(tmp_path, monkeypatch):
    """Within what bfloat16 leaves of two runs on one GPU; the server is killed on the way."""
    run(small(tmp_path / "local", **ON_GPU))
    settings = ["config=ppo_copy", "infer_batch_size=8", "cluster.device=cuda", "dtype=bfloat16"]
    with ServerProcess(tmp_path / "server", *settings) as server:
        killed = []

        def train(self, n, body, send=RemoteValue._train):
            if n == 7 and not killed:
                killed.append(n)
                server.restart()
            return send(self, n, body)

        monkeypatch.setattr(RemoteValue, "_train", train)
        run(small(tmp_path / "remote", server.url, **ON_GPU))
    assert killed
    for local, remote in zip(lines(tmp_path / "local")[:3], lines(tmp_path / "remote")[:3], strict=True):
        for name in ("critic/vf_loss", "critic/grad_norm", "critic/values/mean"):
            assert remote[name] == pytest.approx(local[name], rel=2e-2, abs=1e-3), name
