"""Which setting was meant: the nearest keys of the tree for a name that is not one of them."""

from collections.abc import Iterable
from difflib import SequenceMatcher

MAX_SUGGESTIONS = 3

# What other trainers call the same thing, by the last part of its name.
ELSEWHERE = {
    "learning_rate": "policy.optimizer.lr",
    "clip_eps": "loss_fn.ratio_clip_min",
    "clip_ratio": "loss_fn.ratio_clip_min",
    "clip_ratio_high": "loss_fn.ratio_clip_max",
    "clip_ratio_c": "loss_fn.ratio_clip_c",
    "cliprange_value": "value_loss_fn.cliprange",
    "entropy_coeff": "loss_fn.entropy_bonus",
    "ent_coef": "loss_fn.entropy_bonus",
    "kl_coef": "loss_fn.reference_policy_kl_penalty",
    "vf_coef": "value.loss_coef",
    "adv_estimator": "ppo.adv_estimator.name",
    "gamma": "ppo.adv_estimator.gae_gamma",
    "lam": "ppo.adv_estimator.gae_lambda",
    "n": "ppo.num_generations_per_prompt",
    "num_generations": "ppo.num_generations_per_prompt",
    "train_batch_size": "ppo.num_prompts_per_step",
    "ppo_mini_batch_size": "policy.train_global_batch_size",
    "ppo_micro_batch_size_per_gpu": "policy.train_micro_batch_size",
    "ppo_max_token_len_per_gpu": "policy.max_tokens_per_micro_batch",
    "sequence_packing": "policy.packing",
    "use_remove_padding": "policy.packing",
    "max_response_length": "policy.generation.max_new_tokens",
    "max_completion_length": "policy.generation.max_new_tokens",
    "total_training_steps": "ppo.max_num_steps",
    "max_steps": "ppo.max_num_steps",
    "total_epochs": "ppo.max_num_epochs",
    "save_freq": "checkpointing.save_period",
    "save_steps": "checkpointing.save_period",
    "test_freq": "ppo.val_period",
    "output_dir": "logger.run_dir",
    "resume_mode": "checkpointing.resume",
}


def suggest(key: str, known: Iterable[str]) -> list[str]:
    """The keys that were probably meant, best first; none if nothing is near.

    What other trainers call so comes first, then the same last part in another block (a moved or forgotten block);
    where there is neither, spelling: of the whole key, or (which says less) of its last part.
    """
    known = list(known)
    for mine, other in (("ppo", "reinforce"), ("reinforce", "ppo")):  # a command line or a recipe of the other trainer
        if key.partition(".")[0] == mine and (there := other + key[len(mine) :]) in known:
            return [there]
    last = last_part(key)
    elsewhere = [name for name in [ELSEWHERE.get(last)] if name in known]
    same = [(similarity(key, name), name) for name in known if last_part(name) == last]
    if elsewhere or same:
        return [*elsewhere, *best(same)][:MAX_SUGGESTIONS]
    scored = [(max(similarity(key, name), 0.9 * similarity(last, last_part(name))), name) for name in known]
    return best([(score, name) for score, name in scored if score >= 0.7])


def best(scored: list[tuple[float, str]]) -> list[str]:
    """Names within 0.1 of the best score, the best first, equal ones (to 0.05) in the order of the tree."""
    limit = max((score for score, _ in scored), default=0.0) - 0.1
    near = sorted((pair for pair in scored if pair[0] >= limit), key=lambda pair: -round(pair[0] * 20))
    return [name for _, name in near[:MAX_SUGGESTIONS]]


def similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower()).ratio()


def last_part(key: str) -> str:
    return key.rsplit(".", 1)[-1]
