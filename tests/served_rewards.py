"""Environments that tests/test_remote_reward.py has served, in processes of their own"""

import time

from trainers.environments import RewardError
from trainers.environments.copy import CopyEnvironment


class Rewards:
    """A copy reward for copy's prompts; else what it does is under "do" of the prompt's row, or under "label", where
    OpenRLHF's JSON has it."""

    default_model = "tiny-llama"

    def bind(self, tokenizer, **policy):
        self.words = len(tokenizer)

    def prompts(self):
        return []

    def score(self, samples):
        return [self.one(sample) for sample in samples]

    def one(self, sample):
        row = sample.prompt.metadata
        if "target" in row:
            return CopyEnvironment(size=1, seed=0).score([sample])[0]
        do = row.get("do", row.get("label"))
        if do == "raise":
            raise KeyError("no such thing")
        if do == "nan":
            return float("nan")
        if do == "sleep":
            time.sleep(30)
        if do == "tokens":
            return [i / 3 for i in sample.response_ids]
        if do == "few":
            return [0.5]
        if do == "words":
            return self.words
        if do == "turns":
            return sum(len(message.ids) for message in sample.messages) + sample.metadata["paid"] + sample.reward
        return len(sample.response) / 7 + len(sample.prompt.text) / 3

    def metrics(self, samples, rewards):
        return {"env/total": sum(rewards), "env/nothing": float("nan")}


class Picky:
    """A reward that one response spoils for all."""

    def score(self, samples):
        if any(13 in sample.response_ids for sample in samples):
            raise RewardError("unlucky")
        return [float(sum(sample.response_ids)) for sample in samples]
