"""PPO on gymnasium's CartPole-v1, in one file: vector environments, time-major tensors, a policy and a critic on a CPU.

    pip install "fastppo[examples]"
    python examples/cartpole_ppo.py --seed 0
    python examples/cartpole_ppo.py --seed 0 --ops torch     # the same loop with the four formulas in plain PyTorch

Solved is a mean return of 475 or more over 100 new episodes, actions taken greedily.
"""

import argparse
import time
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

import fastppo


@dataclass
class Settings:
    total_steps: int = 50_000
    num_envs: int = 8
    num_steps: int = 32  # of each environment, between updates
    epochs: int = 20
    minibatch: int = 128
    lr: float = 1e-3  # falls linearly to 0, as clip_eps does
    clip_eps: float = 0.2
    gamma: float = 0.98
    lam: float = 0.8
    ent_coef: float = 0.001
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5


class FastppoOps:
    @staticmethod
    def advantages(rewards, values, terminated, truncated, bootstrap_values, s: Settings):
        flags = {"terminated": terminated, "truncated": truncated, "bootstrap_values": bootstrap_values}
        return fastppo.gae(rewards, values, gamma=s.gamma, lam=s.lam, **flags, time_dim=0, whiten=True)

    @staticmethod
    def logprob(logits, actions):
        return fastppo.logprob(logits, actions)

    @staticmethod
    def loss(logprobs, entropy, values, batch, clip_eps: float, s: Settings):
        policy = fastppo.ppo_loss(
            logprobs, batch["logprobs"], batch["advantages"], clip_eps=clip_eps, entropy=entropy, ent_coef=s.ent_coef
        )
        return policy.loss + s.vf_coef * fastppo.value_loss(values, None, batch["returns"]).loss


class TorchOps:
    @staticmethod
    def advantages(rewards, values, terminated, truncated, bootstrap_values, s: Settings):
        advantages, acc, next_value = torch.zeros_like(values), torch.zeros(()), torch.zeros(())
        for t in reversed(range(len(rewards))):
            ends = terminated[t] | truncated[t]
            next_value = torch.where(terminated[t], 0.0, torch.where(truncated[t], bootstrap_values[t], next_value))
            delta = rewards[t] + s.gamma * next_value - values[t]
            acc = advantages[t] = delta + s.gamma * s.lam * torch.where(ends, 0.0, acc)
            next_value = values[t]
        returns = advantages + values
        variance, mean = torch.var_mean(advantages, correction=0)
        return (advantages - mean) * torch.rsqrt(variance + 1e-8), returns

    @staticmethod
    def logprob(logits, actions):
        logp = logits.log_softmax(-1)
        return logp.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)

    @staticmethod
    def loss(logprobs, entropy, values, batch, clip_eps: float, s: Settings):
        ratio, advantages = (logprobs - batch["logprobs"]).exp(), batch["advantages"]
        clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
        policy = (-torch.min(ratio * advantages, clipped) - s.ent_coef * entropy).mean()
        return policy + s.vf_coef * 0.5 * (values - batch["returns"]).square().mean()


OPS = {"fastppo": FastppoOps, "torch": TorchOps}


@dataclass
class Run:
    mean_return: float = 0.0
    losses: list[float] = field(default_factory=list)  # of each update's last minibatch
    seconds: float = 0.0
    gae_seconds: float = 0.0
    loss_seconds: float = (
        0.0  # log-probs and losses, forward; the rest is the networks', the optimizer's and gymnasium's
    )


def mlp(outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, scale in zip(layers[::2], (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def make_envs(count: int) -> gym.vector.VectorEnv:
    """An episode that ends is followed at once by the next one; its last observation is in the step's info."""
    same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return gym.make_vec("CartPole-v1", num_envs=count, vectorization_mode="sync", vector_kwargs=same_step)


@torch.no_grad()
def rollout(envs, observations: np.ndarray, actor, critic, ops, s: Settings) -> tuple[dict[str, Tensor], np.ndarray]:
    """num_steps of every environment, [T, N]; and the observations to go on from."""
    keys = ("observations", "actions", "logprobs", "rewards", "terminated", "truncated", "after")
    steps: dict[str, list[Tensor]] = {key: [] for key in keys}
    for _ in range(s.num_steps):
        before = torch.as_tensor(observations)
        logits = actor(before)
        actions = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
        observations, rewards, terminated, truncated, info = envs.step(actions.numpy())
        after = observations.copy()
        if "final_obs" in info:  # where an episode ended, `observations` are already the next one's
            ended = info["_final_obs"]
            after[ended] = np.stack(info["final_obs"][ended])
        row = (before, actions, ops.logprob(logits, actions)[0], rewards, terminated, truncated, after)
        for key, value in zip(keys, row, strict=True):
            steps[key].append(torch.as_tensor(value))
    batch = {key: torch.stack(values) for key, values in steps.items()}
    batch["rewards"] = batch["rewards"].float()
    batch["truncated"][-1] = True  # the rollout is cut here; where the pole fell as well, `terminated` wins
    batch["values"] = critic(batch["observations"]).squeeze(-1)
    batch["bootstrap_values"] = critic(batch.pop("after")).squeeze(-1)
    return batch, observations


@torch.no_grad()
def evaluate(actor, seed: int, episodes: int = 100) -> float:
    envs = make_envs(episodes)
    observations, _ = envs.reset(seed=seed)
    returns, alive = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while alive.any():
        observations, rewards, terminated, truncated, _ = envs.step(
            actor(torch.as_tensor(observations)).argmax(-1).numpy()
        )
        returns += rewards * alive
        alive &= ~(terminated | truncated)
    return float(returns.mean())


def train(seed: int = 0, ops: str = "fastppo", s: Settings | None = None, say=lambda text: None) -> Run:
    s = s or Settings()
    torch.manual_seed(seed)
    op, run, began = OPS[ops], Run(), time.perf_counter()
    actor, critic = mlp(2, 0.01), mlp(1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=s.lr, eps=1e-5)
    envs = make_envs(s.num_envs)
    observations, _ = envs.reset(seed=seed)
    size = s.num_envs * s.num_steps
    updates = s.total_steps // size
    for update in range(updates):
        left = 1 - update / updates
        optimizer.param_groups[0]["lr"] = left * s.lr
        batch, observations = rollout(envs, observations, actor, critic, op, s)
        clock = time.perf_counter()
        inputs = [batch.pop(key) for key in ("rewards", "values", "terminated", "truncated", "bootstrap_values")]
        batch["advantages"], batch["returns"] = op.advantages(*inputs, s)
        run.gae_seconds += time.perf_counter() - clock
        flat = {key: value.flatten(0, 1) for key, value in batch.items()}
        for _ in range(s.epochs):
            for rows in torch.randperm(size).split(s.minibatch):
                part = {key: value[rows] for key, value in flat.items()}
                logits, values = actor(part["observations"]), critic(part["observations"]).squeeze(-1)
                clock = time.perf_counter()
                logprobs, entropy = op.logprob(logits, part["actions"])
                loss = op.loss(logprobs, entropy, values, part, left * s.clip_eps, s)
                run.loss_seconds += time.perf_counter() - clock
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, s.max_grad_norm)
                optimizer.step()
        run.losses.append(loss.item())
        if (update + 1) % (updates // 4 or 1) == 0:
            say(f"seed {seed}, {(update + 1) * size:6d} steps: mean return {evaluate(actor, 1000 + seed):5.1f}")
    run.seconds = time.perf_counter() - began
    run.mean_return = evaluate(actor, 2000 + seed)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", choices=OPS, default="fastppo")
    parser.add_argument("--total-steps", type=int, default=Settings.total_steps)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = train(args.seed, args.ops, Settings(total_steps=args.total_steps), print)
    print(
        f"seed {args.seed}, {args.ops}: mean return {run.mean_return:.1f} over 100 episodes; {run.seconds:.0f} s, "
        f"of it advantages {run.gae_seconds:.2f} s, log-probs and losses {run.loss_seconds:.2f} s"
    )


if __name__ == "__main__":
    main()
