"""What a probe of the engine costs beside a step of the default run (docs/engines.md): python runs/probe_cost.py"""

import statistics
import tempfile
import time

from trainers.config import PPOTrainerConfig
from trainers.ppo import PPOTrainer
from trainers.settings import load_config

STEPS = 6
SETTINGS = ["policy.generation.probe_period=1", "checkpointing.enabled=false", "logger.report=false",
            "ppo.val_at_start=false", "ppo.val_at_end=false", f"ppo.max_num_steps={STEPS}"]  # fmt: skip


class Timed(PPOTrainer):
    def goes_on(self) -> bool:
        self.ends = [*getattr(self, "ends", []), time.perf_counter()]
        return super().goes_on()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(None, [*SETTINGS, f"logger.run_dir={folder}/run"], PPOTrainerConfig)
        trainer, probes = Timed(config), []
        ask = trainer.probe.ask

        def timed() -> object:
            start = time.perf_counter()
            answers = ask()
            probes.append(time.perf_counter() - start)
            return answers

        trainer.probe.ask = timed
        trainer.fit()
    steps = [end - start for start, end in zip(trainer.ends, trainer.ends[1:], strict=False)]
    probe, step = statistics.median(probes[1:]), statistics.median(steps[1:])  # the first of each warms up
    print(f"a probe {probe:.2f} s, a step with it {step:.2f} s: {probe / (step - probe):.1%} of a step without")


if __name__ == "__main__":
    main()
